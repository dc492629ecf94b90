"""The layers of a config (defaults, YAML file, environment, command line), and where each value came from.

A layer is a flat mapping from key paths to values. Lists are replaced as a whole by a higher layer, except where it
names an element (``rewards.0.weight=2``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

import yaml
from pydantic_settings import BaseSettings, EnvSettingsSource

from drivetrain.config.base import Problem
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
    """Where a value came from: ``run.yaml:3``, ``environment DRIVETRAIN_...``, ``command line``, ``default``."""

    rank: int  # of the layer; a higher one wins
    text: str
    line: int = 0  # in the file, from 1

    def __str__(self) -> str:
        return f"{self.text}:{self.line}" if self.line else self.text


Values = dict[Key, tuple[Any, Origin]]


@dataclass
class Layer:
    """Values of one source, and the keys at which it sets a whole list."""

    values: Values = field(default_factory=dict)
    lists: set[Key] = field(default_factory=set)

    def add(self, key: Key, value: Any, origin: Origin) -> None:
        """Put a value, nested ones leaf by leaf, over what was there."""
        if isinstance(value, Mapping) and value:
            for name, inner in value.items():
                self.add((*key, str(name)), inner, origin)
            return
        self.clear(key)
        if isinstance(value, list):
            self.lists.add(key)
            for index, inner in enumerate(value):
                self.add((*key, index), inner, origin)
        if not isinstance(value, list) or not value:
            self.values[key] = (value, origin)

    def clear(self, key: Key) -> None:
        """Remove what is below a key, and a scalar or empty list in whose place the key comes."""
        for other in [k for k in self.values if below(k, key) or below(key, k)]:
            del self.values[other]


class _Loader(yaml.SafeLoader):
    """YAML in which ``3e-4`` is a number, as in YAML 1.2."""


_Loader.yaml_implicit_resolvers = {k: list(v) for k, v in yaml.SafeLoader.yaml_implicit_resolvers.items()}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+0123456789.")
)


class _Dumper(yaml.SafeDumper):
    """Writes what ``_Loader`` reads as the same value: ``"3e-4"`` with quotes, and a text of several lines on one."""


_Dumper.yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers
_Dumper.add_multi_representer(PurePath, lambda dumper, path: dumper.represent_data(str(path)))
_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if "\n" in text else None),
)


def dump_value(value: Any, **options: Any) -> str:
    """Write a value as YAML that is read back as it was; on one line, unless options of ``yaml.dump`` say otherwise."""
    options = {"default_flow_style": True, "width": 2**31, "allow_unicode": True, "sort_keys": False, **options}
    return str(yaml.dump(value, Dumper=_Dumper, **options)).strip().removesuffix("\n...")


def parse_value(text: str, where: str = "") -> Any:
    """Read a value as YAML: numbers, booleans, null, lists and mappings; anything else is a string."""
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 - derives from SafeLoader
    except (yaml.YAMLError, ValueError) as cause:
        raise UserError(f"the value {text!r} is not valid YAML", where=where, mend="quote it") from cause


def dotted(key: Iterable[str | int]) -> str:
    """``actor.backend.name``."""
    return ".".join(map(str, key))


def key_of(text: str, dot: str = ".") -> Key:
    """The opposite of ``dotted``; a number is the place of an element in a list."""
    return tuple(int(part) if part.isdecimal() else part for part in text.split(dot))


def below(key: Key, other: Key) -> bool:
    """Whether a key is another one or leads to something inside it."""
    return key[: len(other)] == other


def read_layers(path: Path | None, overrides: Sequence[str], aliases: Mapping[str, str]) -> list[Layer]:
    """Read all layers, lowest first, with other frameworks' keys replaced by ours."""
    defaults = Layer()
    defaults.add((), DEFAULTS, Origin(0, "default"))
    layers = [defaults, *([yaml_layer(path)] if path else []), environment_layer(), command_line_layer(overrides)]
    return [translate(layer, aliases) for layer in layers]


def yaml_layer(path: Path) -> Layer:
    """Read a YAML file, with line numbers."""
    layer, loader = Layer(), _Loader("")

    def walk(key: Key, node: yaml.Node) -> None:
        if isinstance(node, yaml.MappingNode) and node.value:
            seen: set[str] = set()
            for name, _ in node.value:
                part = str(name.value)
                if part in seen:
                    where = f"{path}:{name.start_mark.line + 1}: {dotted((*key, part))}"
                    raise UserError("a key stands twice in one section", where=where, mend="keep one of them")
                seen.add(part)
            loader.flatten_mapping(node)  # `<<: *anchor`; own keys come last and win
            for part, value in {str(name.value): value for name, value in node.value}.items():
                walk((*key, part), value)
        elif isinstance(node, yaml.SequenceNode) and node.value:
            layer.lists.add(key)
            for index, value in enumerate(node.value):
                walk((*key, index), value)
        else:
            origin = Origin(1, str(path), node.start_mark.line + 1)
            layer.add(key, loader.construct_object(node, deep=True), origin)

    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=_Loader)
        if root is not None and not isinstance(root, yaml.MappingNode):
            raise UserError("the config is not a mapping of sections", where=str(path), mend="start with `model:`")
        if root is not None and root.value:
            walk((), root)
    except OSError as cause:
        raise UserError(f"cannot read the config: {cause.strerror}", where=str(path), mend="check the path") from cause
    except (yaml.YAMLError, ValueError) as cause:  # a ValueError: not UTF-8, or a date that does not exist
        mark, what = getattr(cause, "problem_mark", None), getattr(cause, "problem", cause)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise UserError(f"not valid YAML: {what}", where=where, mend="mend the file") from cause
    return layer


def environment_layer() -> Layer:
    """Read ``DRIVETRAIN_ACTOR__OPTIMIZER__LR`` and its kin, values as YAML."""
    layer = Layer()
    variables = EnvSettingsSource(BaseSettings, case_sensitive=False).env_vars
    for name, text in sorted(variables.items(), key=lambda item: item[0].count("__")):  # sections before keys
        variable = name.upper()
        if variable.startswith(PREFIX) and variable not in RESERVED:
            key, where = key_of(variable.removeprefix(PREFIX).lower(), "__"), f"environment {variable}"
            layer.add(key, parse_value(text or "", where), Origin(2, where))
    return layer


def command_line_layer(overrides: Sequence[str]) -> Layer:
    """Read ``section.key=value`` words, values as YAML."""
    layer = Layer()
    for word in overrides:
        name, equals, text = word.partition("=")
        if not equals or not all(name.strip().split(".")):
            raise UserError(f"{word!r} is not of the form section.key=value", where="command line",
                            mend="for example trainer.steps=10")  # fmt: skip
        layer.add(key_of(name.strip()), parse_value(text, f"command line: {name}"), Origin(3, "command line"))
    return layer


def translate(layer: Layer, aliases: Mapping[str, str]) -> Layer:
    """Replace other frameworks' keys by ours. Raises ``ConfigError`` if a key and its alias are both set."""
    out, problems = Layer(lists={_translated(key, aliases) for key in layer.lists}), []
    for key, (value, origin) in layer.values.items():
        ours = _translated(key, aliases)
        if ours != key and (ours in out.values or ours in layer.values):
            problems.append((Problem(key=dotted(key), what=f"{dotted(ours)} is set a second time",
                                     mend="keep one of them"), str(origin)))  # fmt: skip
        out.values[ours] = (value, origin)
    if problems:
        raise ConfigError(problems)
    return out


def _translated(key: Key, aliases: Mapping[str, str]) -> Key:
    for length in range(len(key), 0, -1):
        text = dotted(key[:length])
        ours = aliases.get(text) or aliases.get(f"{text}.*", "").removesuffix(".*")
        if ours:
            return (*key_of(ours), *key[length:])
    return key


def merge(layers: Sequence[Layer]) -> Values:
    """Lay the layers over each other, lowest first. Raises ``ConfigError`` for elements beyond a list's end."""
    merged = Layer()
    for layer in layers:
        for key in layer.lists:
            merged.clear(key)
        for key, value in layer.values.items():
            merged.clear(key)
            merged.values[key] = value
    there = {key[:length] for key in merged.values for length in range(1, len(key) + 1)}
    gaps = []
    for key, (_, origin) in merged.values.items():
        for at, part in enumerate(key):
            if isinstance(part, int) and part > 0 and (*key[:at], part - 1) not in there:
                what = f"{dotted(key[:at])} has no element {part - 1}, so it cannot have an element {part}"
                gaps.append((Problem(key=dotted(key), what=what, mend="elements count from 0"), origin.text))
    if gaps:
        raise ConfigError(gaps)
    return merged.values


def nested(values: Values) -> Any:
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
