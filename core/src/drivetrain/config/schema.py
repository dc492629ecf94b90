"""A JSON schema of configs, for editors: the sections of installed plugins, told apart by ``name``."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from drivetrain.config.layers import DEFAULTS
from drivetrain.config.sections import sections_of
from drivetrain.errors import PluginError
from drivetrain.seam.registry import Registry


def run_schema(model: type[BaseModel], registry: Registry) -> dict[str, Any]:
    """The schema of a config model, with a definition for each selectable plugin."""
    definitions: dict[str, Any] = {}
    schema = _section(model, registry, definitions)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "drivetrain run config", **schema,
            "$defs": definitions}  # fmt: skip


def _section(model: type[BaseModel], registry: Registry, definitions: dict[str, Any]) -> dict[str, Any]:
    own = model.model_json_schema()
    definitions.update(own.pop("$defs", {}))
    for name, info in model.model_fields.items():
        for kind, hook, many in sections_of(info):
            if hook:
                one = _choice(hook, kind, registry, definitions)
            else:
                definitions[kind.__name__] = _section(kind, registry, definitions)
                one = {"$ref": f"#/$defs/{kind.__name__}"}
            one = {"type": "array", "items": one} if many else one
            own["properties"][name] = {"anyOf": [one, {"type": "null"}]} if info.default is None else one
    if "required" in own:
        own["required"] = [key for key in own["required"] if key not in DEFAULTS]
    return own


def _choice(hook: str, base: type[BaseModel], registry: Registry, definitions: dict[str, Any]) -> dict[str, Any]:
    options = []
    for name in registry.names(hook):
        try:
            model = registry.config_model(hook, name) or base
        except PluginError:
            continue  # it cannot be selected either
        one = model.model_json_schema(ref_template=f"#/$defs/{hook}.{name}.{{model}}")
        definitions.update({f"{hook}.{name}.{key}": value for key, value in one.pop("$defs", {}).items()})
        one["properties"]["name"] = {"const": name, "description": registry.select(hook, name).spec.summary}
        one["required"] = sorted({*one.get("required", ()), "name"})
        definitions[f"{hook}.{name}"] = one
        options.append({"$ref": f"#/$defs/{hook}.{name}"})
    return {"oneOf": options} if options else {"not": {}}  # nothing is installed, so nothing is valid
