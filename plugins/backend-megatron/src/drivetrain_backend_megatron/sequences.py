"""Rows of a batch as packed sequences, and where among their tokens the wanted log-probabilities are computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drivetrain import RunError
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


def last_tokens(input_ids: Tensor, attention_mask: Tensor, *, pad: int | None, vocab_size: int) -> Tokens:
    """Texts to be read up to the last token that is none of padding, as transformers' sequence classifiers judge them.

    Args:
        input_ids, attention_mask: ``(rows, tokens)``, right padded with anything.
        pad: the token of padding in the model's config; texts may end with it all the same.

    Raises:
        drivetrain.UserError: for a token that the model does not know.
        drivetrain.RunError: for a row without a token.
    """
    ids, real = input_ids.cpu(), attention_mask.cpu() != 0
    if not bool(real.any(dim=1).all()):
        raise RunError("a text has no token", where="batch")
    place = torch.arange(ids.shape[1] + 1)
    last = torch.where(real & (ids != pad), place[:-1], 0).amax(dim=1) if pad is not None else real.sum(dim=1) - 1
    # what follows it stands for a token that it predicts
    ids = torch.where(place <= last[:, None], torch.nn.functional.pad(ids, (0, 1)), 0)
    return Tokens.of(ids, place <= last[:, None] + 1, place == last[:, None] + 1, vocab_size=vocab_size,
                     where="reward_model.model.tokenizer")  # fmt: skip
