"""Rotary embeddings and core attention of packed sequences. For these megatron-core's attention needs
TransformerEngine, and its rotary embeddings, without that, wait for the device in every layer and go through the
sequences one by one.

Sequences stand one after the other. With ``cp`` ranks of context parallelism each is padded to a multiple of ``2 cp``
tokens, and rank ``r`` has its chunks ``r`` and ``2 cp - 1 - r`` of ``2 cp`` equal ones, so that all ranks have as much
to compute; it gathers the keys and values of all ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from drivetrain_backend_megatron.packing import PackedParams


class CoreAttention(MegatronModule):
    """Causal attention within each packed sequence; the interface is that of megatron-core's core attention."""

    def __init__(
        self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str,
        attention_dropout: float | None = None, softmax_scale: float | None = None, cp_comm_type: str | None = None,
        pg_collection: Any = None, *, frequencies: Tensor,
    ) -> None:  # fmt: skip
        super().__init__(config=config)
        self.group = pg_collection.cp
        self.scale = softmax_scale
        self.frequencies = frequencies

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, attn_mask_type: Any = None,
        attention_bias: Tensor | None = None, packed_seq_params: PackedParams | None = None,
    ) -> Tensor:  # fmt: skip
        """Rotate, and attend.

        Args:
            query: ``(tokens, heads, head_dim)`` of this rank.
            key, value: ``(tokens, groups, head_dim)`` of this rank.

        Returns:
            ``(tokens, heads * head_dim)``
        """
        assert packed_seq_params is not None
        cos, sin = packed_seq_params.rotation(self.frequencies, query.dtype)
        query, key = (_rotated(tensor, cos, sin) for tensor in (query, key))
        if packed_seq_params.keys is not None:
            both = _Gather.apply(torch.stack([key, value]), self.group)
            key, value = both.index_select(1, packed_seq_params.keys).unbind()
        kernel = packed_seq_params.kernel(self.config.attention_kernel, query.device)
        query, key, value = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
        return kernel(query, key, value, None, scaling=self.scale, softcap=None).flatten(1)


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate element i of a head together with the one that stands half a head further (Su et al. 2021,
    arXiv:2104.09864, in the order of transformers)."""
    first, second = heads.chunk(2, -1)
    return heads * cos + torch.cat((-second, first), -1) * sin


class _Gather(torch.autograd.Function):
    """The tokens of all ranks, rank by rank; gradients are summed over ranks."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(parts, mine.contiguous(), group=group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient, group=ctx.group)
        return gradient.chunk(ctx.group.size(), 1)[ctx.group.rank()].contiguous(), None
