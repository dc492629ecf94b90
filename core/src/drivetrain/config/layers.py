"""The layers of a config (defaults, YAML file, environment, command line), and where each value came from.

A layer is a flat mapping from key paths to values. Lists are replaced as a whole by a higher layer, except where it
names an element (``rewards.0.weight=2``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import create_model
from pydantic_settings import BaseSettings, EnvSettingsSource

from drivetrain.config.base import Problem
from drivetrain.config.models import RunConfig
from drivetrain.errors import ConfigError, UserError

Key = tuple[str | int, ...]

PREFIX = "DRIVETRAIN_"
#: variables with the prefix that are no config keys
RESERVED = frozenset({"DRIVETRAIN_DISABLE"})

DEFAULTS: dict[str, Any] = {
    "hybrid_engine": {"name": "shared"},
    "executor": {"name": "local"},
    "hardware": {"name": "auto"},
    "trackers": [{"name": "jsonl"}, {"name": "lines"}],
}


@dataclass(frozen=True)
class Origin:
    """Where a value came from.

    Attributes:
        rank: of the layer; a higher one wins.
        text: ``run.yaml``, ``environment DRIVETRAIN_...``, ``command line``, ``default``.
        line: in the file, from 1; 0 if it has none.
    """

    rank: int
    text: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.text}:{self.line}" if self.line else self.text


@dataclass
class Layer:
    """Values of one source, and the keys at which it sets a whole list."""

    values: dict[Key, tuple[Any, Origin]] = field(default_factory=dict)
    lists: set[Key] = field(default_factory=set)

    def add(self, key: Key, value: Any, origin: Origin) -> None:
        """Put a value, nested ones leaf by leaf."""
        if isinstance(value, Mapping) and value:
            for name, inner in value.items():
                self.add((*key, name), inner, origin)
        elif isinstance(value, list):
            self.lists.add(key)
            if not value:
                self.values[key] = ([], origin)
            for index, inner in enumerate(value):
                self.add((*key, index), inner, origin)
        else:
            self.values[key] = (value, origin)


class _Loader(yaml.SafeLoader):
    """YAML in which ``3e-4`` is a number, as in YAML 1.2."""


_Loader.yaml_implicit_resolvers = {k: list(v) for k, v in yaml.SafeLoader.yaml_implicit_resolvers.items()}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+0123456789.")
)


def parse_value(text: str) -> Any:
    """Read a value as YAML: numbers, booleans, null, lists and mappings; anything else is a string."""
    return yaml.load(text, Loader=_Loader)  # noqa: S506 - derives from SafeLoader


def dotted(key: Iterable[str | int]) -> str:
    """``actor.backend.name``."""
    return ".".join(map(str, key))


def default_layer() -> Layer:
    """What holds when nobody says otherwise."""
    layer = Layer()
    layer.add((), DEFAULTS, Origin(0, "default"))
    return layer


def yaml_layer(path: Path) -> Layer:
    """Read a YAML file, with line numbers.

    Raises:
        UserError: the file cannot be read, is not YAML, holds a key twice, or is no mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as cause:
        raise UserError(f"cannot read the config: {cause.strerror}", where=str(path), mend="check the path") from cause
    try:
        root = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as cause:
        mark = getattr(cause, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise UserError(f"not valid YAML: {getattr(cause, 'problem', cause)}", where=where) from cause
    layer = Layer()
    if root is None:
        return layer
    if not isinstance(root, yaml.MappingNode):
        raise UserError("the config is not a mapping of sections", where=str(path), mend="start with `model:`")
    loader = _Loader("")

    def walk(key: Key, node: yaml.Node) -> None:
        origin = Origin(1, str(path), node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode) and node.value:
            names = [loader.construct_object(name, deep=True) for name, _ in node.value]
            for name in names:
                if names.count(name) > 1:
                    raise UserError("a key stands twice in one section", where=f"{origin}: {dotted((*key, name))}")
            for name, (_, value) in zip(names, node.value):
                walk((*key, name), value)
        elif isinstance(node, yaml.SequenceNode) and node.value:
            layer.lists.add(key)
            for index, value in enumerate(node.value):
                walk((*key, index), value)
        else:
            layer.add(key, loader.construct_object(node, deep=True), origin)

    walk((), root)
    return layer


class _Environment(EnvSettingsSource):
    """pydantic-settings' reading of nested variables, with values in YAML."""

    def decode_complex_value(self, field_name: str, field: Any, value: Any) -> Any:
        return parse_value(value)


def environment_layer() -> Layer:
    """Read ``DRIVETRAIN_ACTOR__OPTIMIZER__LR`` and its kin.

    Raises:
        ConfigError: a variable with the prefix names no section.
    """
    fields: dict[str, Any] = {name: (dict[str, Any], {}) for name in RunConfig.model_fields}
    settings = create_model("Environment", __base__=BaseSettings, **fields)
    source = _Environment(settings, env_prefix=PREFIX, env_nested_delimiter="__", case_sensitive=False)
    layer, unknown = Layer(), []
    for name, value in source.env_vars.items():
        variable = name.upper()
        if not variable.startswith(PREFIX) or variable in RESERVED or value is None:
            continue
        key = tuple(_index(part) for part in variable[len(PREFIX) :].lower().split("__"))
        if key[0] not in RunConfig.model_fields:
            unknown.append((Problem(key=dotted(key), what=f"unknown section {key[0]!r}",
                                    mend=f"unset {variable}"), f"environment {variable}"))  # fmt: skip
    if unknown:
        raise ConfigError(unknown)

    def walk(key: Key, value: Any) -> None:
        variable = PREFIX + "__".join(map(str, key)).upper()
        if isinstance(value, dict) and variable.lower() not in source.env_vars and variable not in source.env_vars:
            for name, inner in value.items():
                walk((*key, _index(name)), inner)
        else:
            parsed = parse_value(value) if isinstance(value, str) else value
            layer.add(key, parsed, Origin(2, f"environment {variable}"))

    for section, value in source().items():
        walk((section,), value)
    return layer


def command_line_layer(overrides: Sequence[str]) -> Layer:
    """Read ``section.key=value`` words.

    Raises:
        UserError: a word is not of that form.
    """
    layer = Layer()
    for word in overrides:
        name, equals, text = word.partition("=")
        if not equals or not name.strip() or any(not part for part in name.split(".")):
            raise UserError(f"{word!r} is not of the form section.key=value", where="command line",
                            mend="for example trainer.steps=10")  # fmt: skip
        try:
            value = parse_value(text)
        except yaml.YAMLError as cause:
            raise UserError(f"the value of {word!r} is not valid YAML", where=f"command line: {name}") from cause
        layer.add(tuple(_index(part) for part in name.strip().split(".")), value, Origin(3, "command line"))
    return layer


def translate(layer: Layer, aliases: Mapping[str, str]) -> Layer:
    """Replace other frameworks' keys by ours.

    Raises:
        ConfigError: a key and its alias are both set in this layer.
    """
    out, problems = Layer(lists=set(layer.lists)), []
    for key, (value, origin) in layer.values.items():
        ours = _translated(key, aliases)
        if ours in out.values or (ours != key and ours in layer.values):
            problems.append((Problem(key=dotted(key), what=f"sets {dotted(ours)} a second time",
                                     mend="keep one of them"), str(origin)))  # fmt: skip
        out.values[ours] = (value, origin)
    if problems:
        raise ConfigError(problems)
    return out


def _translated(key: Key, aliases: Mapping[str, str]) -> Key:
    text = dotted(key)
    if text in aliases:
        return tuple(_index(part) for part in aliases[text].split("."))
    for length in range(len(key) - 1, 0, -1):
        section = aliases.get(f"{dotted(key[:length])}.*")
        if section is not None:
            return (*section.removesuffix(".*").split("."), *key[length:])
    return key


def merge(layers: Sequence[Layer]) -> dict[Key, tuple[Any, Origin]]:
    """Lay the layers over each other, lowest first."""
    merged: dict[Key, tuple[Any, Origin]] = {}
    for layer in layers:
        for root in layer.lists:
            for key in [k for k in merged if k[: len(root)] == root]:
                del merged[key]
        for key, value in layer.values.items():
            for other in [k for k in merged if k != key and (k[: len(key)] == key or key[: len(k)] == k)]:
                del merged[other]  # a scalar in place of a section, or the other way about
            merged[key] = value
    return merged


def nested(values: Mapping[Key, tuple[Any, Origin]]) -> Any:
    """Make mappings and lists of flat values."""
    tree: dict[Any, Any] = {}
    for key, (value, _) in values.items():
        node = tree
        for part in key[:-1]:
            node = node.setdefault(part, {})
        node[key[-1]] = value

    def lists(node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        if node and all(isinstance(name, int) for name in node):
            return [lists(node[index]) for index in sorted(node)]
        return {name: lists(inner) for name, inner in node.items()}

    return lists(tree)


def _index(part: str) -> str | int:
    return int(part) if part.isdigit() else part
