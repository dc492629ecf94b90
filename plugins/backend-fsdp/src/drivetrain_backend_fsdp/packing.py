"""Sequences packed without padding, and micro-batches that hold at most so many tokens.

The real tokens of some rows stand one row after the other in a single row ``(1, tokens)`` whose positions start anew
with each sequence. Longest sequences come first, so that sequences of similar length are neighbours.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from drivetrain import RunError, UserError

if TYPE_CHECKING:
    from drivetrain_backend_fsdp.ulysses import SequenceRanks


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
    def of(cls, input_ids: Tensor, attention_mask: Tensor, wanted: Tensor, *, vocab_size: int) -> Tokens:
        """Find what has to be read.

        Args:
            input_ids, attention_mask: ``(rows, prompt + response)``.
            wanted: ``(rows, response)``, non-zero where a log-probability is wanted.
            vocab_size: of the model.

        Raises:
            drivetrain.UserError: for a token that the model does not know.
            drivetrain.RunError: for a wanted token that is padding or has no token before it.
        """
        input_ids, real, wanted = input_ids.cpu(), attention_mask.cpu() != 0, wanted.cpu() != 0
        position = real.cumsum(dim=1) - 1
        before = position[:, real.shape[1] - wanted.shape[1] :]
        if bool((wanted & ~real[:, real.shape[1] - wanted.shape[1] :]).any()):
            raise RunError("response_mask selects a token that attention_mask calls padding", where="backend fsdp")
        if bool((wanted & (before < 1)).any()):
            raise RunError("a response token has no token before it, so its log-probability is undefined",
                           where="backend fsdp", mend="give every prompt at least one token")  # fmt: skip
        last = torch.where(wanted, before, 0).amax(dim=1) if wanted.shape[1] else wanted.new_zeros(len(wanted)).long()
        read = real & (position < last[:, None])
        known = torch.where(real, input_ids, 0)
        if known.numel() and not 0 <= int(known.min()) <= int(known.max()) < vocab_size:
            raise UserError(f"token {int(known.max())} is not among the {vocab_size} tokens of the model",
                            where="model.tokenizer", mend="use the tokenizer that belongs to the model")  # fmt: skip
        return cls(input_ids=input_ids, wanted=wanted, read=read, position=position, lengths=read.sum(1).tolist())


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
    order = sorted((row for row in rows if tokens.lengths[row]), key=lambda row: -tokens.lengths[row])
    if not order:
        return None
    index = torch.tensor(order)
    place_of = {row: place for place, row in enumerate(rows)}
    lengths = torch.tensor([tokens.lengths[row] for row in order])
    start = lengths.cumsum(0) - lengths
    ids, read, position = tokens.input_ids[index], tokens.read[index], tokens.position[index]
    wanted = tokens.wanted[index]
    where, column = wanted.nonzero(as_tuple=True)
    prompt = ids.shape[1] - wanted.shape[1]
    packed = Packed(
        input_ids=ids[read][None],
        position_ids=position[read][None],
        lengths=tuple(lengths.tolist()),
        predictor=start[where] + position[where, prompt + column] - 1,
        target=ids[where, prompt + column],
        row=torch.tensor([place_of[row] for row in order])[where],
        column=column,
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
