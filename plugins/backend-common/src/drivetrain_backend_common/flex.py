"""Attention over packed sequences with PyTorch's FlexAttention (Dong et al. 2024, arXiv:2412.05496).

A token of the packed row looks at those from ``first`` of it to itself, where ``first`` is the start of its sequence,
window or chunk. Of the blocks of 128 x 128 pairs a kernel visits those that hold such a pair, and asks for the pairs
only where a block also holds others.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from drivetrain import UserError
from drivetrain_backend_common import dynamo

if TYPE_CHECKING:
    from drivetrain_backend_common.attention_kernels import Reach

BLOCK = 128
"""Tokens on a side of a block."""


class Flex:
    """The kernel ``flex``: compiled on CUDA. On a CPU PyTorch has no backward pass of it, and it serves models that do
    not learn, as single operations with the scores of all pairs in memory."""

    half = False

    def __init__(self, lengths: Sequence[int], device: torch.device, keys: Sequence[int] | None = None) -> None:
        if keys is not None:
            raise UserError("flex does not compute attention of a part of each sequence", where="backend.attention",
                            mend="set it to sdpa or varlen")  # fmt: skip
        sizes = torch.tensor(lengths)
        starts = sizes.cumsum(0) - sizes
        self._start = starts.repeat_interleave(sizes).to(device)  # of each token's sequence
        self._masks: dict[Reach | None, BlockMask] = {}

    @staticmethod
    def check(device: torch.device, dtype: torch.dtype, *, learns: bool) -> None:
        if device.type == "cpu" and learns:
            raise UserError("flex has no backward pass on a CPU", where="backend.attention", mend="set it to sdpa")
        if device.type not in ("cpu", "cuda"):
            raise UserError(f"flex is not known to run on {device.type}", where="backend.attention",
                            mend="set it to sdpa")  # fmt: skip
        if device.type == "cuda" and importlib.util.find_spec("triton") is None:
            raise UserError("flex on CUDA needs triton, which is not installed here", where="backend.attention",
                            mend="install a torch that brings it, or set it to sdpa or varlen")  # fmt: skip

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, reach: Reach | None, *, scaling: float | None,
        softcap: float | None,
    ) -> Tensor:  # fmt: skip
        if reach not in self._masks:
            position = torch.arange(len(self._start), device=self._start.device)
            first = self._start
            if reach is not None:
                first = torch.maximum(first, first + reach.first(position - first))
            self._masks[reach] = block_mask(first)
        on_cpu = query.device.type == "cpu"
        out = (flex_attention if on_cpu else _compiled())(
            query, key, value, block_mask=self._masks[reach], scale=scaling, enable_gqa=query.shape[1] != key.shape[1],
            score_mod=None if softcap is None else _softcap(softcap, query.device),
            # short rows are those of the self-test at the start, which is to test the kernel that learns
            kernel_options=None if on_cpu else {"FORCE_USE_FLEX_ATTENTION": True},
        )  # fmt: skip
        return cast(Tensor, out)[0].transpose(0, 1)


def block_mask(first: Tensor) -> BlockMask:
    """The mask of a row in which token t looks at tokens ``first[t]`` to t; ``first`` never falls."""

    def looks(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key >= first[query])

    tokens = len(first)
    start = torch.arange(0, tokens, BLOCK, device=first.device)
    last = (start + BLOCK - 1).clamp(max=tokens - 1)
    query_block, key_block = start[:, None], start[None]
    some = (key_block <= query_block) & (key_block + BLOCK > first[start][:, None])
    every = (key_block < query_block) & (key_block >= first[last][:, None])
    return BlockMask.from_kv_blocks(
        *_listed(some & ~every), *_listed(every), BLOCK_SIZE=BLOCK, mask_mod=looks, seq_lengths=(tokens, tokens)
    )


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of keys each block of queries has, and their places first in a row of all."""
    order = blocks.int().argsort(dim=1, descending=True, stable=True)
    return blocks.sum(dim=1, dtype=torch.int32)[None, None], order.int()[None, None]


@functools.cache
def _softcap(limit: float, device: torch.device) -> Callable[..., Tensor]:
    bound = torch.tensor(limit, device=device)  # a number would become a variable of the compiled kernel: it cannot

    def capped(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return torch.tanh(score / bound) * bound

    return capped


@functools.cache
def _compiled() -> Any:
    """One kernel for rows of every length. What cannot be compiled is an error, not another kernel."""
    dynamo.allow_graphs()
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)
