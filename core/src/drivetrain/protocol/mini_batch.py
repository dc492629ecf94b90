"""Cutting a batch into mini-batches of whole prompts.

Rows of one prompt share a `uid`; rows whose loss is one term (the pair of DPO) share a `loss_group`.
The unit that is shuffled and dealt out is a set of rows connected by either.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch


def plan(
    uids: Sequence[Hashable],
    loss_groups: Sequence[Hashable] | None,
    prompts: int,
    generator: torch.Generator | None = None,
) -> list[list[int]]:
    """Row numbers of each mini-batch of `prompts` distinct uids; every row in exactly one.

    Units come in order of their first row, or shuffled by `generator`; rows of a unit in order. A
    `loss_group` of None joins nothing. Raises ValueError when not every mini-batch can be full.
    """
    total = len(set(uids))
    if prompts < 1 or total % prompts:
        left = f": {total % prompts} would be left over" if prompts > 0 else ""
        raise ValueError(f"{total} prompts ({len(uids)} rows) do not divide into mini-batches of {prompts}{left}")
    units = _units(uids, loss_groups)
    if generator is not None:
        order = torch.randperm(len(units), generator=generator, device=generator.device)
        units = [units[position] for position in order.tolist()]
    sized = [(len({uids[row] for row in unit}), unit) for unit in units]
    # Units of several prompts first, single prompts fill what they leave; where all are alike the
    # sort, which is stable, changes nothing.
    sized.sort(key=lambda size_and_unit: -size_and_unit[0])
    room = [prompts] * (total // prompts)
    batches: list[list[int]] = [[] for _ in room]
    for size, unit in sized:
        batch = next((number for number, free in enumerate(room) if free >= size), None)
        if batch is None:
            raise ValueError(
                f"a loss_group ties {size} prompts together: mini-batches of {prompts} prompts"
                f" cannot be filled from units of {sorted({size for size, _ in sized})} prompts"
            )
        batches[batch] += unit
        room[batch] -= size
    return batches


def _units(uids: Sequence[Hashable], groups: Sequence[Hashable] | None) -> list[list[int]]:
    """Rows connected by a shared uid or group, by union-find; in order of their first row."""
    parent = list(range(len(uids)))

    def root(row: int) -> int:
        while parent[row] != row:
            parent[row] = parent[parent[row]]
            row = parent[row]
        return row

    for labels in (uids, groups or ()):
        first: dict[Hashable, int] = {}
        for row, label in enumerate(labels):
            if label is not None:
                one, two = sorted((root(first.setdefault(label, row)), root(row)))
                parent[two] = one
    units: dict[int, list[int]] = {}
    for row in range(len(uids)):
        units.setdefault(root(row), []).append(row)
    return list(units.values())
