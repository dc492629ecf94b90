"""Attention over packed sequences with PyTorch's fused causal kernel, for sequences of similar length at a time.

Tokens of ``(1, heads, tokens, dim)`` are regrouped to ``(sequences, heads, longest, dim)``, right padded. Causal
attention needs no mask for right padding, and nothing of ``tokens x tokens`` exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from drivetrain_backend_common.attention_kernels import Reach

SIMILAR = 0.75
"""The shortest sequence of a group has at least this share of the longest one's tokens."""


class Sdpa:
    """The kernel ``sdpa``. Layers that look back less far than sequences are long get the mask of one sequence: that of
    a shorter one is a corner of it."""

    half = False

    def __init__(self, lengths: Sequence[int], device: torch.device, keys: Sequence[int] | None = None) -> None:
        self._groups = () if keys is not None else groups(lengths, device)
        self._parts = None if keys is None else (tuple(lengths), tuple(keys))
        self._masks: dict[Reach, Tensor] = {}

    @staticmethod
    def check(device: torch.device, dtype: torch.dtype, *, learns: bool) -> None:
        """Runs everywhere."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, reach: Reach | None, *, scaling: float | None,
        softcap: float | None,
    ) -> Tensor:  # fmt: skip
        if self._parts is not None:
            assert reach is None and softcap is None, "parts of sequences look at all before them"
            return _of_parts(query, key, value, *self._parts, scaling=scaling)
        whole = None if reach is None else self._mask(reach, query.device)
        grouped_heads = query.shape[1] != key.shape[1]
        # Kernels that save memory share key heads only where no mask is given and, but for the CPU, in half precision.
        share = grouped_heads and whole is None and (query.device.type == "cpu" or query.dtype.itemsize == 2)
        outputs = []
        for group in self._groups:
            q, k, v = (group.split(tensor) for tensor in (query, key, value))
            mask = None if whole is None else whole[..., : group.longest, : group.longest]
            if softcap is not None:
                outputs.append(group.join(softcapped(q, k, v, mask, scaling, softcap)))
                continue
            if grouped_heads and not share:
                k, v = (heads.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for heads in (k, v))
            attended = scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=share
            )
            outputs.append(group.join(attended))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _mask(self, reach: Reach, device: torch.device) -> Tensor:
        """Of the longest sequence, ``(1, 1, longest, longest)``."""
        if reach not in self._masks:
            position = torch.arange(max(group.longest for group in self._groups), device=device)
            query, key = position[:, None], position[None]
            self._masks[reach] = ((key <= query) & (key >= reach.first(query)))[None, None]
        return self._masks[reach]


@dataclass(frozen=True)
class Group:
    """Neighbouring sequences of similar length: tokens ``start`` to ``stop`` of the packed row."""

    start: int
    stop: int
    sequences: int
    longest: int
    place: Tensor | None
    """of each token in ``sequences * longest``; None where all are equally long"""

    def split(self, packed: Tensor) -> Tensor:
        """``(1, heads, tokens, dim)`` to ``(sequences, heads, longest, dim)``; a view where no padding is needed."""
        tokens = packed[0].transpose(0, 1)[self.start : self.stop]
        if self.place is not None:
            tokens = cast(Tensor, _Spread.apply(tokens, self.place, self.sequences * self.longest))
        return tokens.reshape(self.sequences, self.longest, *tokens.shape[1:]).transpose(1, 2)

    def join(self, separate: Tensor) -> Tensor:
        """``(sequences, heads, longest, dim)`` to ``(stop - start, heads, dim)``."""
        tokens = separate.transpose(1, 2).flatten(0, 1)
        return tokens if self.place is None else cast(Tensor, _Gather.apply(tokens, self.place))


class _Spread(torch.autograd.Function):
    """Rows to their places among zeros. Places differ, so the gradient is a plain selection."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, place: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(place)
        return rows.new_zeros(size, *rows.shape[1:]).index_copy_(0, place, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(0, ctx.saved_tensors[0]), None, None


class _Gather(torch.autograd.Function):
    """The inverse of :class:`_Spread`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        ctx.size = len(rows)
        return rows.index_select(0, place)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.new_zeros(ctx.size, *grad.shape[1:]).index_copy_(0, ctx.saved_tensors[0], grad), None


def groups(lengths: Sequence[int], device: torch.device) -> tuple[Group, ...]:
    """Cut a packed row into groups of neighbours of similar length; there are fewest with the longest first."""
    result = []
    first = start = 0
    while first < len(lengths):
        longest = lengths[first]
        end = first
        while end < len(lengths) and longest >= lengths[end] >= SIMILAR * longest:
            end += 1
        mine = lengths[first:end]
        place = None
        if min(mine) != longest:
            place = torch.cat([torch.arange(n) + i * longest for i, n in enumerate(mine)]).to(device)
        result.append(Group(start, start + sum(mine), len(mine), longest, place))
        first, start = end, start + sum(mine)
    return tuple(result)


def _of_parts(
    query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...], keys: tuple[int, ...], *, scaling: float | None
) -> Tensor:
    """Attention of parts of sequences, one by one; the keys of each are those before its end."""
    outputs = []
    for q, k, v in zip(query.split(lengths, 2), key.split(keys, 2), value.split(keys, 2), strict=True):
        size, seen = q.shape[2], k.shape[2]
        mask = None
        if seen != size:
            mask = torch.ones(size, seen, dtype=torch.bool, device=q.device).tril(seen - size)
        k, v = (heads.repeat_interleave(q.shape[1] // heads.shape[1], dim=1) for heads in (k, v))
        attended = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling)
        outputs.append(attended[0].transpose(0, 1))
    return torch.cat(outputs)


def softcapped(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None, softcap: float
) -> Tensor:
    """softmax(c tanh(s q k^T / c)) v, for which there is no fused kernel; the scores of all pairs exist."""
    key, value = (heads.repeat_interleave(query.shape[1] // heads.shape[1], dim=1) for heads in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = (scores / softcap).tanh() * softcap
    if mask is None and query.shape[2] > 1:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return scores.softmax(dim=-1, dtype=torch.float32).to(value.dtype) @ value
