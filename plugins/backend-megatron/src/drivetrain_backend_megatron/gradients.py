"""Gradients as sums: over micro-batches, data and context parallelism, and wherever ranks share a parameter.

megatron-core averages by default. With ``calculate_per_token_loss`` it sums, and would divide by a count of tokens at
the end; losses here are divided by global counts before they come to it, so there is nothing left to divide by.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from torch import nn


def wrapped(
    pieces: Sequence[GPTModel], *, distributed_optimizer: bool = False, overlap_reduce: bool = False,
    overlap_gather: bool = False, bucket_size: int | None = None,
) -> list[DistributedDataParallel]:  # fmt: skip
    """The pieces with float32 buffers ``main_grad`` for their gradients, which :func:`pipeline.run` fills.

    Args:
        distributed_optimizer: each data parallel rank has the sums for a share of the parameters alone.
        overlap_reduce: sum buckets of gradients while others are computed.
        overlap_gather: gather buckets of updated parameters when a module needs them.
        bucket_size: parameters of a bucket.
    """
    options = pieces[0].config
    options.finalize_model_grads_func = _finalize
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=overlap_reduce, overlap_param_gather=overlap_gather,
        use_distributed_optimizer=distributed_optimizer, bucket_size=bucket_size, check_for_nan_in_grad=False,
        average_in_collective=False,
    )  # fmt: skip
    found = [DistributedDataParallel(options, settings, piece, disable_bucketing=number > 0)
             for number, piece in enumerate(pieces)]  # fmt: skip
    if overlap_reduce:  # in the last micro-batch alone
        waits = [piece.no_sync for piece in found]
        options.no_sync_func = waits if len(waits) > 1 else waits[0]
    return found


def storages(pieces: Sequence[DistributedDataParallel]) -> list[torch.UntypedStorage]:
    """The memory of the buffers."""
    return [buffer.grad_data.untyped_storage() for piece in pieces
            for buffer in (*piece.buffers, *piece.expert_parallel_buffers)]  # fmt: skip


def _finalize(pieces: list[nn.Module], tokens: Any = None, **options: Any) -> None:
    finalize_model_grads(pieces, None, **options)
