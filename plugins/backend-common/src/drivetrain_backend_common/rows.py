"""Rows of a batch as tokens to be read, packed sequences of them, and micro-batches of at most so many tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from drivetrain import RunError, UserError

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """The tokens of a batch's rows that the model has to read, on the host.

    Attributes:
        input_ids, attention_mask: ``(rows, sequence)``.
        wanted: ``(rows, response)`` bool, the response tokens whose log-probability is wanted.
        read: ``(rows, sequence)`` bool, the tokens before each row's last wanted one: no other can matter to it.
        lengths: of each row in ``read``.
    """

    input_ids: Tensor
    wanted: Tensor
    read: Tensor
    position: Tensor
    lengths: list[int]

    @classmethod
    def of(
        cls, input_ids: Tensor, attention_mask: Tensor, wanted: Tensor, *, vocab_size: int,
        where: str = "model.tokenizer",
    ) -> Tokens:  # fmt: skip
        """Find what has to be read.

        Args:
            input_ids, attention_mask: ``(rows, prompt + response)``.
            wanted: ``(rows, response)``, non-zero where a log-probability is wanted.
            vocab_size: of the model.
            where: the key of the tokenizer, for messages.

        Raises:
            drivetrain.UserError: for a token that the model does not know.
            drivetrain.RunError: for a wanted token that is padding or has no token before it.
        """
        input_ids, real, wanted = input_ids.cpu(), attention_mask.cpu() != 0, wanted.cpu() != 0
        position = real.cumsum(dim=1) - 1
        before = position[:, real.shape[1] - wanted.shape[1] :]
        if bool((wanted & ~real[:, real.shape[1] - wanted.shape[1] :]).any()):
            raise RunError("response_mask selects a token that attention_mask calls padding", where="batch")
        if bool((wanted & (before < 1)).any()):
            raise RunError("a response token has no token before it, so its log-probability is undefined",
                           where="batch", mend="give every prompt at least one token")  # fmt: skip
        last = torch.where(wanted, before, 0).amax(dim=1) if wanted.shape[1] else wanted.new_zeros(len(wanted)).long()
        read = real & (position < last[:, None])
        known = torch.where(real, input_ids, 0)
        if known.numel() and not 0 <= int(known.min()) <= int(known.max()) < vocab_size:
            raise UserError(f"token {int(known.max())} is not among the {vocab_size} tokens of the model",
                            where=where, mend="use the tokenizer that belongs to the model")  # fmt: skip
        return cls(input_ids=input_ids, wanted=wanted, read=read, position=position, lengths=read.sum(1).tolist())


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """Some rows packed without padding, one after the other, longest first: those of similar length are neighbours.

    Attributes:
        ids: ``(tokens,)``.
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
    def of(cls, tokens: Tokens, rows: Sequence[int]) -> Self:
        """Pack rows; where none of them has a wanted token, it is one token with which a rank only keeps pace."""
        order = sorted((row for row in rows if tokens.lengths[row]), key=lambda row: -tokens.lengths[row])
        if not order:
            none = torch.zeros(0, dtype=torch.long)
            return cls(ids=torch.zeros(1, dtype=torch.long), lengths=(1,), sequence=none, offset=none, target=none,
                       row=none, column=none)  # fmt: skip
        index = torch.tensor(order)
        place_of = {row: place for place, row in enumerate(rows)}
        ids, wanted = tokens.input_ids[index], tokens.wanted[index]
        sequence, column = wanted.nonzero(as_tuple=True)
        prompt = ids.shape[1] - wanted.shape[1]
        return cls(
            ids=ids[tokens.read[index]],
            lengths=tuple(tokens.lengths[row] for row in order),
            sequence=sequence,
            offset=tokens.position[index][sequence, prompt + column] - 1,
            target=ids[sequence, prompt + column],
            row=torch.tensor([place_of[row] for row in order])[sequence],
            column=column,
        )


def starts(lengths: Sequence[int]) -> Tensor:
    """``(sequences,)`` where sequences of such lengths begin, one after the other."""
    sizes = torch.tensor(lengths)
    return sizes.cumsum(0) - sizes


def micro_batches(lengths: Sequence[int], units: Iterable[Sequence[int]], budget: int) -> list[list[int]]:
    """Put units into as few micro-batches of at most ``budget`` tokens as first-fit-decreasing finds.

    A unit above the budget is a micro-batch by itself. The result depends on the arguments alone.
    """
    sizes = [(sum(lengths[row] for row in unit), list(unit)) for unit in units]
    room: list[int] = []
    plan: list[list[int]] = []
    open_from = 0
    smallest = min((size for size, _ in sizes), default=0)
    for size, unit in sorted(sizes, key=lambda sized: -sized[0]):
        while open_from < len(room) and room[open_from] < smallest:
            open_from += 1
        fits = (place for place in range(open_from, len(room)) if room[place] >= size)
        place = next(fits, None)
        if place is None:
            place = len(room)
            room.append(budget)
            plan.append([])
        room[place] -= size
        plan[place] += unit
    return [sorted(batch) for batch in plan]
