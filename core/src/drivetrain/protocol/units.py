"""Rows that belong together."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence


def units(rows: int, joins: Iterable[Sequence[Hashable]]) -> list[list[int]]:
    """Sets of rows that must not be separated: those connected by an equal label in one of ``joins``.

    Args:
        joins: for each reason to stay together, a label per row; None joins nothing.

    Returns:
        the units by their first row, rows in order.
    """
    parent = list(range(rows))

    def root(row: int) -> int:
        while parent[row] != row:
            parent[row] = parent[parent[row]]
            row = parent[row]
        return row

    for labels in joins:
        first: dict[Hashable, int] = {}
        for row, label in enumerate(labels):
            if label is not None:
                low, high = sorted((root(first.setdefault(label, row)), root(row)))
                parent[high] = low
    sets: dict[int, list[int]] = {}
    for row in range(rows):
        sets.setdefault(root(row), []).append(row)
    return list(sets.values())
