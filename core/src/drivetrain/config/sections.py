"""Which sections of a config are read by plugins: those marked with the hook that offers their names."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from drivetrain.config.base import PluginConfig
from drivetrain.config.layers import Key
from drivetrain.config.models import Offered


def plugin_sections(
    model: type[BaseModel], node: Any, key: Key = ()
) -> Iterator[tuple[Key, str, type[PluginConfig], Any]]:
    """Find the sections that plugins read in a config, or in mappings of its shape, as far as they are there.

    Yields:
        section: its key, the hook that offers its name, the base class of its model, and what is there.
    """
    values = node if isinstance(node, dict) else dict(node) if isinstance(node, BaseModel) else {}
    for name, info in model.model_fields.items():
        here, value = (*key, name), values.get(name)
        for kind, hook, many in sections_of(info) if value is not None else ():
            if many:
                elements = enumerate(value if isinstance(value, (list, tuple)) else ())
                yield from (((*here, at), hook, kind, element) for at, element in elements)
            elif hook:
                yield here, hook, kind, value
            else:
                yield from plugin_sections(kind, value, here)


def sections_of(info: FieldInfo) -> Iterator[tuple[type[Any], str, bool]]:
    """The models inside a field, each with the hook that offers its name, or "", and whether the field lists them."""
    own = next((mark.hook for mark in info.metadata if isinstance(mark, Offered)), "")
    for kind, mark in types_inside(info.annotation):
        yield kind, mark.hook if mark else own, mark is not None


def types_inside(annotation: Any, mark: Offered | None = None) -> Iterator[tuple[type[Any], Offered | None]]:
    """The models inside an annotation, each with the mark around it."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        yield from types_inside(args[0], next((a for a in args[1:] if isinstance(a, Offered)), mark))
    elif origin in (typing.Union, types.UnionType, tuple):
        for arg in args:
            yield from types_inside(arg, mark)
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, mark
