"""Micro-batches through the model, whatever its parallelism."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from torch import Tensor, nn

from drivetrain_backend_megatron.packing import PackedParams, packed_params, places


def run(
    pieces: Sequence[nn.Module],
    micro_batches: Sequence[tuple[Tensor, Sequence[int]]],
    loss: Callable[[Tensor, PackedParams, int], Tensor],
    *,
    forward_only: bool,
    fillers: Collection[int] = (),
) -> None:
    """Evaluate the model on micro-batches, and unless ``forward_only`` sum the gradients of their losses.

    A collective call of the ranks that share a copy of the model, with equal micro-batches.

    Args:
        pieces: of the model, on this rank, perhaps in the wrappers that sum gradients.
        micro_batches: of each the ``(tokens,)`` ids of its sequences, one after the other, and their lengths.
        loss: called on the last stage with what the model gives, what describes the packing, and the number of the
            micro-batch. The model gives logits ``(1, tokens, vocabulary)``, this rank's share of the tokens (padded)
            and of the vocabulary (padded); or what :func:`head.detach` says. The result is a share of a loss.
        fillers: numbers of micro-batches that are none of a batch's, with which a rank keeps pace.
    """
    device = next(pieces[0].parameters()).device
    options = get_model_config(pieces[0])
    cp, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    multiple = options.tensor_model_parallel_size if options.sequence_parallel else 1

    def step(batches: Any, model: nn.Module) -> Any:
        number, (tokens, lengths) = next(batches)
        packed = packed_params(lengths, device, cp=cp, rank=rank, multiple=multiple, filler=number in fillers)
        ids = torch.cat([nn.functional.pad(sequence, (0, room - len(sequence)))
                         for sequence, room in zip(tokens.split(list(lengths)), packed.lengths)])  # fmt: skip
        ids = ids[places(packed.lengths, cp=cp, rank=rank)][None].to(device)
        routed = {} if options.num_moe_experts is None else {"padding_mask": packed.padding}
        output = model(ids, None, None, packed_seq_params=packed, **routed)

        def share(given: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
            return loss(given, packed, number), torch.tensor(0, dtype=torch.int), {}

        return output, share

    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[iter(enumerate(micro_batches)) for _ in pieces] if len(pieces) > 1
        else iter(enumerate(micro_batches)),
        model=list(pieces),
        num_microbatches=len(micro_batches),
        seq_length=1,  # the lengths vary, and stages tell each other
        micro_batch_size=1,
        forward_only=forward_only,
    )  # fmt: skip
