"""From layers to a frozen, checked config: every problem is found before anything heavy is imported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from drivetrain.config.base import AlgorithmConfig, PluginConfig, Problem
from drivetrain.config.compose import compose_problems, derive_roles
from drivetrain.config.layers import (
    Key,
    Layer,
    Origin,
    command_line_layer,
    default_layer,
    dotted,
    environment_layer,
    merge,
    nested,
    translate,
    yaml_layer,
)
from drivetrain.config.models import RunConfig
from drivetrain.config.sections import offered_sections, types_inside
from drivetrain.errors import ConfigError, PluginError
from drivetrain.seam.registry import Registry


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A config that can run.

    Attributes:
        run: the frozen config.
        origins: where each given value came from, by dotted key.
        notes: what was decided for the user: derived roles, dropped keys.
    """

    run: RunConfig
    origins: Mapping[str, Origin]
    notes: Sequence[str]


def load_config(path: Path | None, overrides: Sequence[str], registry: Registry) -> Resolved:
    """Read all layers and resolve them.

    Raises:
        ConfigError: everything that is wrong, at once.
        UserError: a layer cannot be read.
    """
    layers = [default_layer()]
    if path is not None:
        layers.append(yaml_layer(path))
    layers += [environment_layer(), command_line_layer(overrides)]
    return resolve_config(layers, registry)


def resolve_config(layers: Sequence[Layer], registry: Registry) -> Resolved:
    """Resolve layers, lowest first. Raises ``ConfigError``."""
    aliases = {k: v for spec in registry.specs("config_aliases") for k, v in spec.aliases.items()}
    return _Resolution([translate(layer, aliases) for layer in layers], registry).result()


@dataclass
class _Resolution:
    layers: Sequence[Layer]
    registry: Registry
    notes: list[str] = field(default_factory=list)
    problems: list[tuple[Key, Problem]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.values = merge(self.layers)

    def result(self) -> Resolved:
        self._drop_sections_of_another_algorithm()
        tree = nested(self.values)
        failed: list[Key] = []
        for key, hook, base in list(offered_sections(RunConfig, tree)):
            section = self._section(key, hook, base)
            if section is None:
                failed.append(key)
            _put(tree, key, section)
        run = self._validate(RunConfig, tree, (), skip=failed)
        if run is not None and not failed:
            run, notes = derive_roles(run)
            self.notes += notes
            for problem in compose_problems(run, self.registry):
                self.problems.append((tuple(problem.key.split(".")), problem))
        if self.problems:
            raise ConfigError((problem, self._origin(key)) for key, problem in self.problems)
        assert run is not None
        origins = {dotted(key): origin for key, (_, origin) in self.values.items()}
        return Resolved(run=run, origins=origins, notes=tuple(self.notes))

    def _section(self, key: Key, hook: str, base: type[PluginConfig]) -> PluginConfig | None:
        """Validate one plugin's section with the model of the plugin that offers its name."""
        name, origin = self.values.get((*key, "name"), (None, None))
        if origin is None:
            choices = ", ".join(self.registry.names(hook))
            self._problem((*key, "name"), "is missing", f"name one of: {choices}")
            return None
        found = self.registry.find(hook, str(name))
        if found.problem is not None:
            self._problem((*key, "name"), found.problem.what, found.problem.mend)
            return None
        try:
            model = self.registry.config_model(hook, str(name)) or base
        except PluginError as error:
            self._problem((*key, "name"), error.what, error.mend)
            return None
        self._drop_keys_of_another_plugin(key, model, origin)
        return self._validate(model, nested(self._below(key)), key)

    def _validate(self, model: type[Any], data: Any, key: Key, skip: Sequence[Key] = ()) -> Any:
        """Validate; on errors note them, and validate again without the keys that are at fault."""
        try:
            return model.model_validate(data)
        except ValidationError as error:
            at_fault = []
            for item in error.errors(include_url=False):
                where = (*key, *_loc(item["loc"], data))
                if any(where[: len(s)] == s for s in skip):
                    continue
                at_fault.append(where)
                self._problem(where, *_explain(item, model))
        if at_fault and data is not None and not skip:
            for where in at_fault:
                _remove(data, where[len(key) :])
            try:
                return model.model_validate(data)
            except ValidationError:
                return None
        return None

    def _drop_keys_of_another_plugin(self, key: Key, model: type[BaseModel], name: Origin) -> None:
        known = set(model.model_fields) | {f.alias for f in model.model_fields.values() if f.alias}
        before = [layer.values[(*key, "name")][0] for layer in self.layers[: name.rank] if (*key, "name") in layer.values]
        if not before or before[-1] == self.values[(*key, "name")][0]:
            return
        for path in self._below(key):
            value, origin = self.values[(*key, *path)]
            if path[0] not in known and origin.rank < name.rank:
                self._drop((*key, *path), f"{dotted((*key, 'name'))} is now {self.values[(*key, 'name')][0]!r}")

    def _drop_sections_of_another_algorithm(self) -> None:
        """A critic or ref of a lower layer goes with the algorithm that needed it."""
        name, origin = self.values.get(("algorithm", "name"), (None, None))
        if origin is None:
            return
        for role in ("critic", "ref"):
            keys = [k for k in self.values if k[0] == role]
            if keys and all(self.values[k][1].rank < origin.rank for k in keys) and not self._needs(str(name), role):
                for key in keys:
                    self._drop(key, f"algorithm {name!r} has no role {role}")

    def _needs(self, name: str, role: str) -> bool:
        if self.registry.find("algorithms", name).problem is not None:
            return True
        model = self.registry.config_model("algorithms", name) or AlgorithmConfig
        known = {k: v for k, (v, _) in self._items(("algorithm",)) if k[0] in model.model_fields}
        try:
            config = model.model_validate(nested({k: (v, Origin(0, "")) for k, v in known.items()}))
        except ValidationError:
            return True
        return role in config.roles()

    def _drop(self, key: Key, why: str) -> None:
        value, origin = self.values.pop(key)
        self.notes.append(f"dropped {dotted(key)}={value!r} ({origin}): {why}")

    def _items(self, key: Key) -> Iterator[tuple[Key, tuple[Any, Origin]]]:
        return ((k[len(key) :], v) for k, v in self.values.items() if k[: len(key)] == key and len(k) > len(key))

    def _below(self, key: Key) -> dict[Key, tuple[Any, Origin]]:
        return dict(self._items(key))

    def _problem(self, key: Key, what: str, mend: str = "") -> None:
        self.problems.append((key, Problem(key=dotted(key), what=what, mend=mend)))

    def _origin(self, key: Key) -> str:
        """The file or other source that a message about a key points to."""
        key = tuple(int(part) if isinstance(part, str) and part.isdigit() else part for part in key)
        for length in range(len(key), 0, -1):
            origins = [o for k, (_, o) in self.values.items() if k[:length] == key[:length]]
            if origins:
                return max(origins, key=lambda origin: origin.rank).text
        return next((layer_origin.text for layer in self.layers for _, layer_origin in layer.values.values()
                     if layer_origin.rank == 1), "")  # fmt: skip


def _put(tree: Any, key: Key, value: Any) -> None:
    for part in key[:-1]:
        tree = tree[part]
    tree[key[-1]] = value


def _remove(tree: Any, key: Key) -> None:
    for part in key[:-1]:
        if not isinstance(tree, (dict, list)):
            return
        tree = tree[part]
    if isinstance(tree, dict):
        tree.pop(key[-1], None)


def _loc(loc: tuple[int | str, ...], data: Any) -> Key:
    """The part of an error's location that consists of keys of the data (pydantic adds names of types)."""
    out: list[str | int] = []
    for part in loc:
        if isinstance(data, (dict, list)):
            out.append(part)
            try:
                data = data[part]  # type: ignore[index]
            except (KeyError, IndexError, TypeError):
                data = None
    return tuple(out)


def _explain(item: Any, model: type[BaseModel]) -> tuple[str, str]:
    """Say an error of pydantic's in the words of a config."""
    kind, last = item["type"], str(item["loc"][-1]) if item["loc"] else ""
    if kind == "extra_forbidden":
        return f"unknown key {last!r}", _choices(model, item["loc"])
    if kind == "missing":
        return "is missing", f"set {dotted(item['loc'])}"
    message = str(item["msg"]).removeprefix("Value error, ")
    return message[:1].lower() + message[1:] + f", got {item['input']!r}" * (kind != "value_error"), ""


def _choices(model: type[BaseModel], loc: tuple[int | str, ...]) -> str:
    for part in loc[:-1]:
        field_info = model.model_fields.get(str(part))
        inner = [t for t, _ in types_inside(field_info.annotation)] if field_info else []
        if not inner:
            return ""
        model = inner[0]
    return f"known keys: {', '.join(model.model_fields)}"
