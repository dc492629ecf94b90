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
from drivetrain.config.layers import Key, Layer, Origin, Values, below, dotted, key_of, merge, nested, read_layers
from drivetrain.config.models import RunConfig
from drivetrain.config.sections import plugin_sections, sections_of
from drivetrain.errors import ConfigError, PluginError
from drivetrain.seam.registry import Registry

DERIVED = "derived from actor"


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A config that can run."""

    run: RunConfig
    origins: Mapping[str, Origin]  # where each given value came from, by dotted key
    notes: Sequence[str]  # what was decided for the user: derived roles, dropped keys

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
    aliases = {k: v for spec in registry.specs("config_aliases") for k, v in spec.aliases.items()}
    return _Resolution(read_layers(path, overrides, aliases), registry).result()


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
        self._complete_roles()
        tree = nested(self.values)
        failed: list[Key] = []
        for key, hook, base, _ in list(plugin_sections(RunConfig, tree)):
            section = self._section(key, hook, base)
            if section is None:
                failed.append(key)
            _around(tree, key)[key[-1]] = section
        run = self._validate(RunConfig, tree, (), skip=failed)
        origins = {dotted(key): origin for key, (_, origin) in self.values.items()}
        if run is not None and not failed:
            run, derived = derive_roles(run)
            self.notes += [f"{'' if '.' in key else 'role '}{key} derives from actor" for key in derived]
            origins.update({key: Origin(0, DERIVED) for key in derived})
            if run.actor_is_reference:
                self.notes.append("role ref is the actor without its adapter")
            wrong = {key for key, _ in self.problems}
            for problem in compose_problems(run, self.registry):
                key = key_of(problem.key)
                if not any(below(key, w) or below(w, key) for w in wrong):
                    self.problems.append((key, problem))
        if self.problems:
            raise ConfigError((problem, self._origin(key)) for key, problem in self.problems) from self.cause
        assert run is not None
        return Resolved(run=run, origins=origins, notes=tuple(self.notes))

    def _section(self, key: Key, hook: str, base: type[PluginConfig]) -> Any:
        """Validate one plugin's section with the model of the plugin that offers its name; None if there is none."""
        scalar = self.values.get(key, (None, None))[0]
        if isinstance(scalar, str):
            return self._problem(key, f"{scalar!r} is no section", f"write {dotted(key)}.name={scalar}")
        where = (*key, "name")
        name = self._name(key)
        if name is None:
            return self._problem(where, f"{dotted(key)} has no name", self._choices(hook))
        found = self.registry.find(hook, name)
        if found.problem is not None:
            self.cause = self.cause or found.cause
            return self._problem(where, found.problem.what, found.problem.mend)
        try:
            model = self.registry.config_model(hook, name) or base
        except PluginError as error:
            self.cause = self.cause or error.__cause__
            return self._problem(where, error.what, error.mend)
        if not (isinstance(model, type) and issubclass(model, base)):
            what = f"the config model of {found.spec.noun} {name!r} does not derive from drivetrain.{base.__name__}"
            return self._problem(where, what, "tell its author")
        changed = self._renamed(key)
        for path, (_, origin) in self._inside(key).items():
            if changed and path[0] not in model.model_fields and origin.rank < changed.rank:
                self._drop((*key, *path), f"{dotted(where)} is now {name!r}")
        return self._validate(model, nested(self._inside(key)), key)

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
            at_fault: list[Key] = []
            for item in error.errors(include_url=False):
                loc = _loc(item["loc"], data)
                if not any(below((*key, *loc), s) for s in skip):
                    at_fault.append(loc)
                    self._problem((*key, *loc), *self._explain(item, model, (*key, *loc)))
        if not at_fault or data is None or skip:
            return None
        for loc in sorted(filter(None, at_fault), key=len, reverse=True):
            around = _around(data, loc)
            if isinstance(around, dict):
                around.pop(loc[-1], None)
        try:
            return model.model_validate(data)
        except ValidationError:
            return None

    def _renamed(self, key: Key) -> Origin | None:
        """The origin of a section's name, if that layer changed the name which lower layers gave."""
        where = (*key, "name")
        name, origin = self.values[where]
        if origin.text == DERIVED:
            where = ("actor", *key[1:], "name")
        given = [layer.values[where] for layer in self.layers if where in layer.values]
        before = [lower for lower, its_origin in given if its_origin.rank < origin.rank]
        return origin if before and before[-1] != name else None

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

    def _complete_roles(self) -> None:
        """A critic or ref that says something, and not its backend, has the rest from the actor."""
        actor = self._inside(("actor",))
        for role, parts in (("critic", ("backend", "optimizer", "schedule", "max_grad_norm")), ("ref", ("backend",))):
            given = self._inside((role,))
            if not given or ("backend", "name") in given or ("backend",) in given:
                continue
            self.notes.append(f"role {role} derives from actor, but for what is set")
            for key, (value, origin) in actor.items():
                own = (key[0], "name") in given or any(below(k, key) or below(key, k) for k in given)
                if key[0] in parts and not own:
                    self.values |= {(role, *key): (value, Origin(origin.rank, DERIVED))}

    def _needs(self, name: str | None, role: str) -> bool:
        """Whether an algorithm has a role with the settings that it knows; true if that cannot be told."""
        try:
            model = self.registry.config_model("algorithms", str(name)) or AlgorithmConfig
            known = {k: value for k, value in self._inside(("algorithm",)).items() if k[0] in model.model_fields}
            config = model.model_validate(nested(known))
        except (PluginError, ValidationError):
            return True
        return not isinstance(config, AlgorithmConfig) or role in config.roles()

    def _drop(self, key: Key, why: str) -> None:
        value, origin = self.values.pop(key)
        self.notes.append(f"dropped {dotted(key)}={value!r} ({origin}): {why}")

    def _inside(self, key: Key) -> Values:
        return {k[len(key) :]: value for k, value in self.values.items() if below(k, key) and k != key}

    def _explain(self, item: Any, model: type[BaseModel], where: Key) -> tuple[str, str]:
        """Say an error of pydantic's in the words of a config: what is wrong, and what to do."""
        kind, last = item["type"], str(where[-1]) if where else ""
        owner, info = _field(model, item["loc"])
        about = f"{last}: {info.description}" if info and info.description else ""
        if kind == "extra_forbidden":
            close = [f"did you mean {name}?" for name in difflib.get_close_matches(last, owner.model_fields, n=1)]
            return f"unknown key {last!r}", "\n".join([*close, f"known keys: {', '.join(owner.model_fields)}"])
        if kind == "missing":
            hook = next((hook for _, hook, many in sections_of(info) if not many), "") if info else ""
            return f"{last} is missing", self._choices(hook) if hook else about or f"add {dotted(where)}"
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
            origins = [o for k, (_, o) in self.values.items() if below(k, key[:length])]
            if origins:
                return max(origins, key=lambda origin: origin.rank).text
        given = (origin for layer in self.layers for _, origin in layer.values.values())
        return next((origin.text for origin in given if origin.rank == 1), "")


def _around(tree: Any, key: Key) -> Any:
    """The mapping or list that holds a key."""
    for part in key[:-1]:
        tree = tree[part]
    return tree


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
            inner = next((kind for kind, _, _ in sections_of(info)), None) if info else None
            if at < len(key) and inner:
                model = inner
    return model, info
