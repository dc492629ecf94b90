"""Sequences packed without padding.

The real tokens of some rows stand one row after the other in a single row ``(1, tokens)`` whose positions start anew
with each sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from drivetrain_backend_common.rows import Sequences, Tokens, starts

if TYPE_CHECKING:
    from drivetrain_backend_fsdp.ulysses import SequenceRanks


@dataclass(frozen=True, kw_only=True)
class Packed:
    """Some rows, packed.

    Attributes:
        input_ids, position_ids: ``(1, tokens)``.
        lengths: tokens of each sequence, in order, longest first.
        predictor: ``(wanted,)`` place in ``tokens`` of the token whose hidden state predicts the wanted one.
        target: ``(wanted,)`` the wanted tokens.
        row, column: ``(wanted,)`` where they belong in ``(rows, response)``; rows count within the packed ones.
        ranks: that hold a share of the row each; None where this one holds it all. With ranks, ``tokens`` is the share,
            ``predictor`` and ``target`` are of the wanted tokens that the share predicts, and the rest is of all.
        own: which of the wanted tokens these are.
    """

    input_ids: Tensor
    position_ids: Tensor
    lengths: tuple[int, ...]
    predictor: Tensor
    target: Tensor
    row: Tensor
    column: Tensor
    ranks: SequenceRanks | None = None
    own: Tensor | None = None

    def to(self, device: torch.device) -> Packed:
        """The same on a device."""
        held: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, value in held.items():
            held[name] = value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
        return Packed(**held)


def pack(
    tokens: Tokens, rows: Sequence[int], device: torch.device, ranks: SequenceRanks | None = None
) -> Packed | None:
    """Pack rows, and take this rank's share where ranks share them; None if none of them has a wanted token."""
    sequences = Sequences.of(tokens, rows)
    if not len(sequences.row):
        return None
    packed = Packed(
        input_ids=sequences.ids[None],
        position_ids=torch.cat([torch.arange(length) for length in sequences.lengths])[None],
        lengths=sequences.lengths,
        predictor=starts(sequences.lengths)[sequences.sequence] + sequences.offset,
        target=sequences.target,
        row=sequences.row,
        column=sequences.column,
    )
    return (packed if ranks is None else ranks.cut(packed)).to(device)


def filler(device: torch.device, ranks: SequenceRanks | None = None) -> Packed:
    """One token that a rank without work runs, so that it takes part in the collective calls of the others."""
    zero = torch.zeros(1, dtype=torch.long)
    packed = Packed(
        input_ids=zero[None], position_ids=zero[None], lengths=(1,),
        predictor=zero, target=zero, row=zero, column=zero,
    )  # fmt: skip
    return (packed if ranks is None else ranks.cut(packed)).to(device)
