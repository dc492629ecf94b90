"""Which sections of a config are read by plugins: those marked with the hook that offers their names."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from drivetrain.config.base import PluginConfig
from drivetrain.config.models import Offered, RunConfig

Key = tuple[str | int, ...]


def offered_sections(model: type[BaseModel], tree: Any, key: Key = ()) -> Iterator[tuple[Key, str, type[PluginConfig]]]:
    """Find the sections that plugins read, as far as the tree has them."""
    if not isinstance(tree, dict):
        return
    for name, info in model.model_fields.items():
        if name not in tree or tree[name] is None:
            continue
        marks = [m for m in info.metadata if isinstance(m, Offered)]
        here = (*key, name)
        for kind, mark in types_inside(info.annotation):
            if marks:
                yield here, marks[0].hook, kind
            elif mark is not None:  # of the elements of a list
                elements = range(len(tree[name])) if isinstance(tree[name], list) else ()
                yield from (((*here, at), mark.hook, kind) for at in elements)
            elif issubclass(kind, BaseModel):
                yield from offered_sections(kind, tree[name], here)


def types_inside(annotation: Any, mark: Offered | None = None) -> Iterator[tuple[type[Any], Offered | None]]:
    """The classes inside an annotation, each with the mark around it."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        yield from types_inside(args[0], next((a for a in args[1:] if isinstance(a, Offered)), mark))
    elif origin in (typing.Union, types.UnionType, tuple):
        for arg in args:
            if arg not in (type(None), Ellipsis):
                yield from types_inside(arg, mark)
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, mark


def selected_sections(run: RunConfig) -> list[tuple[str, str, PluginConfig]]:
    """The plugin sections of a config as ``(dotted key, hook, section)``."""

    def at(key: Key) -> Any:
        node: Any = run
        for part in key:
            node = node[part] if isinstance(part, int) else getattr(node, part)
        return node

    return [(".".join(map(str, key)), hook, at(key)) for key, hook, _ in offered_sections(RunConfig, _outline(run))]


def _outline(node: Any) -> Any:
    """Mappings and lists in the shape of a config, down to its plugin sections."""
    if isinstance(node, PluginConfig):
        return {"name": node.name}
    if isinstance(node, BaseModel):
        return {name: _outline(getattr(node, name)) for name in type(node).model_fields}
    if isinstance(node, (tuple, list)):
        return [_outline(item) for item in node]
    return node
