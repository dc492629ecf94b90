"""Rows of a batch as packed sequences, and where among their tokens the wanted log-probabilities are computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drivetrain_backend_common.rows import Tokens
from drivetrain_backend_megatron.packing import PackedParams


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """Some rows, one after the other, longest first.

    Attributes:
        ids: ``(tokens,)``, without padding.
        lengths: tokens of each sequence.
        sequence, offset: ``(wanted,)`` the token whose hidden state predicts a wanted one: its sequence, and its place
            in it.
        target: ``(wanted,)`` the wanted tokens.
        row, column: ``(wanted,)`` where they belong in ``(rows, response)``; rows count within the packed ones.
    """

    ids: Tensor
    lengths: tuple[int, ...]
    sequence: Tensor
    offset: Tensor
    target: Tensor
    row: Tensor
    column: Tensor

    @classmethod
    def of(cls, tokens: Tokens, rows: Sequence[int]) -> Sequences:
        """Pack rows; where none of them has a wanted token, it is one token with which a rank only keeps pace."""
        order = sorted((row for row in rows if tokens.lengths[row]), key=lambda row: -tokens.lengths[row])
        if not order:
            none = torch.zeros(0, dtype=torch.long)
            return cls(ids=torch.zeros(1, dtype=torch.long), lengths=(1,), sequence=none, offset=none, target=none,
                       row=none, column=none)  # fmt: skip
        index = torch.tensor(order)
        place_of = {row: place for place, row in enumerate(rows)}
        ids, wanted = tokens.input_ids[index], tokens.wanted[index]
        where, column = wanted.nonzero(as_tuple=True)
        prompt = ids.shape[1] - wanted.shape[1]
        return cls(
            ids=ids[tokens.read[index]],
            lengths=tuple(tokens.lengths[row] for row in order),
            sequence=where,
            offset=tokens.position[index][where, prompt + column] - 1,
            target=ids[where, prompt + column],
            row=torch.tensor([place_of[row] for row in order])[where],
            column=column,
        )

    def predictors(self, packed: PackedParams, *, cp: int, rank: int) -> tuple[Tensor, Tensor]:
        """Which of the wanted tokens a rank of context parallelism predicts, and the places of their predictors among
        its own tokens: ``(own,)`` each, on the host.
        """
        lengths = torch.tensor(packed.lengths)
        place = (lengths.cumsum(0) - lengths)[self.sequence] + self.offset
        if packed.order is None:
            return torch.arange(len(place)), place
        size, place = int(lengths.sum()) // cp, packed.order.cpu()[place]
        own = (place // size == rank).nonzero()[:, 0]
        return own, place[own] % size
