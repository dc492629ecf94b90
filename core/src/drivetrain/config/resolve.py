"""From layers to a frozen, checked config: every problem is found before anything heavy is imported."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

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
    key_of,
    merge,
    nested,
    translate,
    yaml_layer,
)
from drivetrain.config.models import Offered, RunConfig
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

    def origin(self, key: str) -> str:
        """Where a value came from: the highest origin of it and its elements, else that of the section around it."""
        found = [origin for name, origin in self.origins.items() if name == key or name.startswith(f"{key}.")]
        parts = key.split(".")
        around = (self.origins.get(".".join(parts[:size])) for size in range(len(parts) - 1, 0, -1))
        return str(max(found, key=lambda origin: origin.rank) if found else next(filter(None, around), "default"))


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
    cause: BaseException | None = None

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
        origins = {dotted(key): origin for key, (_, origin) in self.values.items()}
        if run is not None and not failed:
            run, derived = derive_roles(run)
            self.notes += [f"role {role} derives from actor" for role in derived]
            origins.update({role: Origin(0, "derived from actor") for role in derived})
            wrong = {key for key, _ in self.problems}
            for problem in compose_problems(run, self.registry):
                key = key_of(problem.key.split("."))
                if not any(key[: len(w)] == w or w[: len(key)] == key for w in wrong):
                    self.problems.append((key, problem))
        if self.problems:
            raise ConfigError((problem, self._origin(key)) for key, problem in self.problems) from self.cause
        assert run is not None
        return Resolved(run=run, origins=origins, notes=tuple(self.notes))

    def _section(self, key: Key, hook: str, base: type[PluginConfig]) -> Any:
        """Validate one plugin's section with the model of the plugin that offers its name."""
        scalar = self.values.get(key, (None, None))[0]
        if isinstance(scalar, str):
            return self._problem(key, f"{scalar!r} is no section", f"write {dotted(key)}.name={scalar}")
        name = self._name(key)
        if name is None:
            return self._problem((*key, "name"), f"{dotted(key)} has no name", self._choices(hook))
        found = self.registry.find(hook, name)
        if found.problem is not None:
            self.cause = self.cause or found.cause
            return self._problem((*key, "name"), found.problem.what, found.problem.mend)
        try:
            model = self.registry.config_model(hook, name) or base
        except PluginError as error:
            self.cause = self.cause or error.__cause__
            return self._problem((*key, "name"), error.what, error.mend)
        if not (isinstance(model, type) and issubclass(model, base)):
            what = f"the config model of {found.spec.noun} {name!r} does not derive from drivetrain.{base.__name__}"
            return self._problem((*key, "name"), what, "tell its author")
        self._drop_keys_of_another_plugin(key, model)
        return self._validate(model, nested(self._below(key)), key)

    def _choices(self, hook: str) -> str:
        return f"name one of: {', '.join(self.registry.names(hook)) or 'none is installed'}"

    def _name(self, key: Key) -> str | None:
        name = self.values.get((*key, "name"), (None, None))[0]
        return None if name is None else str(name)

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
                self._problem(where, *self._explain(item, model, where))
        if at_fault and data is not None and not skip:
            for where in at_fault:
                _remove(data, where[len(key) :])
            try:
                return model.model_validate(data)
            except ValidationError:
                return None
        return None

    def _renamed(self, key: Key) -> Origin | None:
        """The origin of a section's name, if that layer changed the name which lower layers gave."""
        where = (*key, "name")
        name, origin = self.values[where]
        given = [layer.values[where] for layer in self.layers if where in layer.values]
        before = [lower for lower, its_origin in given if its_origin.rank < origin.rank]
        return origin if before and before[-1] != name else None

    def _drop_keys_of_another_plugin(self, key: Key, model: type[BaseModel]) -> None:
        changed = self._renamed(key)
        for path, (_, origin) in self._below(key).items():
            if changed and path[0] not in model.model_fields and origin.rank < changed.rank:
                self._drop((*key, *path), f"{dotted((*key, 'name'))} is now {self._name(key)!r}")

    def _drop_sections_of_another_algorithm(self) -> None:
        """A critic or ref of a lower layer goes with the algorithm that needed it."""
        name = self._name(("algorithm",))
        changed = self._renamed(("algorithm",)) if name else None
        for role in ("critic", "ref"):
            keys = [key for key in self.values if key[0] == role]
            lower = keys and changed and all(self.values[key][1].rank < changed.rank for key in keys)
            if lower and not self._needs(name, role):
                for key in keys:
                    self._drop(key, f"algorithm {name!r} has no role {role}")

    def _needs(self, name: str | None, role: str) -> bool:
        """Whether an algorithm has a role with the settings that it knows; true if that cannot be told."""
        try:
            model = self.registry.config_model("algorithms", str(name)) or AlgorithmConfig
            known = {k: value for k, value in self._below(("algorithm",)).items() if k[0] in model.model_fields}
            config = model.model_validate(nested(known))
        except (PluginError, ValidationError):
            return True
        return not isinstance(config, AlgorithmConfig) or role in config.roles()

    def _drop(self, key: Key, why: str) -> None:
        value, origin = self.values.pop(key)
        self.notes.append(f"dropped {dotted(key)}={value!r} ({origin}): {why}")

    def _below(self, key: Key) -> dict[Key, tuple[Any, Origin]]:
        size = len(key)
        return {k[size:]: value for k, value in self.values.items() if k[:size] == key and len(k) > size}

    def _explain(self, item: Any, model: type[BaseModel], where: Key) -> tuple[str, str]:
        """Say an error of pydantic's in the words of a config: what is wrong, and what to do."""
        kind, last = item["type"], str(where[-1]) if where else ""
        owner, info = _field(model, item["loc"])
        about = f"{last}: {info.description}" if info and info.description else ""
        marks = [mark for mark in info.metadata if isinstance(mark, Offered)] if info else []
        if kind == "extra_forbidden":
            close = difflib.get_close_matches(last, owner.model_fields, n=1)
            hint = [f"did you mean {close[0]}?"] if close else []
            return f"unknown key {last!r}", "\n".join([*hint, f"known keys: {', '.join(owner.model_fields)}"])
        if kind == "missing":
            return f"{last} is missing", self._choices(marks[0].hook) if marks else about or f"add {dotted(where)}"
        got = "a section" if isinstance(item["input"], dict) else f"{item['input']!r:.60}"
        if kind in ("model_type", "tuple_type"):
            return f"{last} takes {'a list' if kind == 'tuple_type' else 'a section'}, got {got}", about
        message = str(item["msg"]).removeprefix("Value error, ")
        return message[:1].lower() + message[1:] + f", got {got}" * (kind != "value_error"), about

    def _problem(self, key: Key, what: str, mend: str = "") -> None:
        self.problems.append((key, Problem(key=dotted(key), what=what, mend=mend)))

    def _origin(self, key: Key) -> str:
        """The file or other source that a message about a key points to."""
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
        tree = tree.get(part) if isinstance(tree, dict) else None
    if key and isinstance(tree, dict):
        tree.pop(key[-1], None)


def _loc(loc: tuple[int | str, ...], data: Any) -> Key:
    """The part of an error's location that consists of keys of the data (pydantic adds names of types)."""
    out: list[str | int] = []
    for at, part in enumerate(loc, 1):
        items = data if isinstance(data, dict) else dict(enumerate(data)) if isinstance(data, list) else None
        if items is not None and (part in items or at == len(loc)):
            out.append(part)
            data = items.get(part)
    return tuple(out)


def _field(model: type[BaseModel], key: Key) -> tuple[type[BaseModel], FieldInfo | None]:
    """The field at a key relative to a model, and the model that has it."""
    info = None
    for at, part in enumerate(key, 1):
        if isinstance(part, str):
            info = model.model_fields.get(part)
            inner = [kind for kind, _ in types_inside(info.annotation)] if info else []
            if at < len(key) and inner:
                model = inner[0]
    return model, info
