"""Sequences packed one after the other, and the share of them that a rank of context parallelism has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from drivetrain_backend_common.attention_kernels import Kernel


@dataclass
class PackedParams(PackedSeqParams):  # type: ignore[misc]
    """megatron-core's description of packed sequences, with what is known on the host.

    Attributes:
        lengths: of the sequences with their padding, over all ranks of context parallelism.
        order: ``(tokens,)`` the places of the tokens in those of all ranks, one rank after the other.
        positions: ``(tokens,)`` of this rank's tokens in their sequences.
        padding: ``(1, tokens)`` which of them are padding, or none of a batch's.
        parts: lengths of the parts of sequences that this rank has, one after the other, and of the keys that each
            looks at: those of its sequence until its own end.
        keys: the places of these keys in the tokens of all ranks, one rank after the other.
    """

    lengths: tuple[int, ...] = ()
    order: Tensor | None = None
    positions: Tensor | None = None
    padding: Tensor | None = None
    parts: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    keys: Tensor | None = None
    _made: dict[Any, Any] = field(default_factory=dict)

    def kernel(self, kind: type[Kernel], device: torch.device) -> Kernel:
        """That attends to these sequences; one for all layers."""
        if kind not in self._made:
            lengths, keys = self.parts or (self.lengths, None)
            self._made[kind] = kind(lengths, device, keys)
        made: Kernel = self._made[kind]
        return made

    def rotation(self, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the rotary embedding, ``(tokens, 1, head_dim)``; once for all layers."""
        if dtype not in self._made:
            assert self.positions is not None
            angles = (self.positions[:, None].float() * frequencies).repeat(1, 2)[:, None]
            self._made[dtype] = angles.cos().to(dtype), angles.sin().to(dtype)
        cos, sin = self._made[dtype]
        return cos, sin


def packed_params(
    lengths: Sequence[int], device: torch.device, *, cp: int = 1, rank: int = 0, multiple: int = 1, filler: bool = False
) -> PackedParams:
    """Describe packed sequences.

    Each is padded at its end to a multiple of ``2 cp`` with context parallelism, and the last one further until every
    rank's share of all is a multiple of ``multiple``.

    Args:
        lengths: tokens of each sequence.
        cp: ranks of context parallelism.
        rank: this one of them.
        multiple: ranks that split the tokens of a rank further (sequence parallelism).
        filler: whether the tokens are none of a batch's.
    """
    unit = 2 * cp if cp > 1 else 1
    padded = [-(-length // unit) * unit for length in lengths]
    while sum(padded) // cp % multiple:
        padded[-1] += unit
    ends = torch.tensor([0, *padded], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
    mine = places(padded, cp=cp, rank=rank)
    positions = torch.cat([torch.arange(length) for length in padded])[mine]
    ends_of_real = torch.tensor(lengths).repeat_interleave(torch.tensor(padded))[mine]
    padding = ((positions >= ends_of_real) | filler)[None]
    order = keys = parts = None
    if cp > 1:
        order = torch.empty(sum(padded), dtype=torch.long)
        size = sum(padded) // cp
        for one in range(cp):
            order[places(padded, cp=cp, rank=one)] = torch.arange(size) + one * size
        chunks = [(start, length // unit) for start, length in zip(accumulate(padded, initial=0), padded)]
        spans = [(start, chunk * (number + 1)) for start, chunk in chunks for number in (rank, unit - 1 - rank)]
        keys = torch.cat([order[start : start + seen] for start, seen in spans]).to(device)
        parts = tuple(chunk for _, chunk in chunks for _ in range(2)), tuple(seen for _, seen in spans)
        order = order.to(device)
    return PackedParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=max(padded), max_seqlen_kv=max(padded),
        lengths=tuple(padded), order=order, positions=positions.to(device), padding=padding.to(device), parts=parts,
        keys=keys,
    )  # fmt: skip


def places(padded: Sequence[int], *, cp: int, rank: int) -> Tensor:
    """``(tokens / cp,)`` the places in the packed tokens of those that a rank has."""
    if cp == 1:
        return torch.arange(sum(padded))
    mine, start = [], 0
    for length in padded:
        chunks = torch.arange(start, start + length).view(2 * cp, -1)
        mine += [chunks[rank], chunks[2 * cp - 1 - rank]]
        start += length
    return torch.cat(mine)
