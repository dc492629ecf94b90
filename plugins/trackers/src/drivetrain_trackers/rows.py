"""Samples and configs in the plain types that tables and services take."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

#: columns that are no text
NUMBERS = {"score": float, "correct": bool}


def table(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Columns of samples, in the order in which they appear. A column is text, or as ``NUMBERS`` says; None stays."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [_cell(name, row.get(name)) for row in rows] for name in names}


def _cell(name: str, value: Any) -> Any:
    if value is None:
        return None
    return NUMBERS[name](value) if name in NUMBERS else text(value)


def text(value: Any) -> str:
    """A string as it is, anything else as JSON; what UTF-8 has no bytes for becomes a question mark."""
    words = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return words.encode("utf-8", "replace").decode("utf-8")


def flat(values: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested mappings and lists with their dotted keys, such as ``rewards.0.name``."""
    if isinstance(values, Mapping) and values:
        for name, value in values.items():
            yield from flat(value, f"{key}.{name}" if key else str(name))
    elif isinstance(values, (list, tuple)) and values:
        yield from flat(dict(enumerate(values)), key)
    else:
        yield key, values
