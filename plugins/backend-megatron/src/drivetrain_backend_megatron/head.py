"""What comes after the last layer: this rank's part of the vocabulary, without logits, or a layer of scores."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from drivetrain_backend_common.judges import scores_of
from drivetrain_backend_common.log_probs import Head


def detach(piece: GPTModel) -> None:
    """Make the last stage give hidden states ``(1, tokens, hidden)`` in place of logits.

    They are those of all tokens of a rank of context parallelism. Their gradient is summed over the ranks of tensor
    parallelism, which have a part of the vocabulary each.
    """
    gathers = piece.config.sequence_parallel

    def forward(hidden: Tensor, **unused: Any) -> tuple[Tensor, None]:
        if gathers:
            return gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True), None
        return copy_to_tensor_model_parallel_region(hidden), None

    piece.output_layer.forward = forward


class Score(nn.Module):
    """A linear layer from hidden states to values or to logits of classes, in place of the output layer.

    Every rank of tensor parallelism has it all, and computes the same with it. As the output layer it gives the hidden
    states ``(tokens, 1, hidden)`` of all tokens of a rank of context parallelism; :meth:`of` is the layer itself.
    """

    def __init__(self, config: TransformerConfig, labels: int, *, bias: bool) -> None:
        super().__init__()
        self.gathers = config.sequence_parallel
        self.weight = nn.Parameter(torch.empty(labels, config.hidden_size, dtype=config.params_dtype))
        self.bias = nn.Parameter(torch.empty(labels, dtype=config.params_dtype)) if bias else None

    def forward(self, hidden: Tensor, **unused: Any) -> tuple[Tensor, None]:
        """Gather the tokens, of which each rank takes the gradient of its own back: the ranks' losses are one."""
        if self.gathers:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return hidden, None

    def of(self, hidden: Tensor) -> Tensor:
        """``(tokens, labels)`` in float32, from ``(tokens, hidden)``."""
        return scores_of(hidden, self.weight, self.bias)


class TensorRanks:
    """The ranks of tensor parallelism, as those that share the vocabulary.

    Attributes:
        start: the first token that this rank has.
        rows: how many it has; beyond them its part of the output layer is padding.
    """

    def __init__(self, vocab_size: int) -> None:
        size, rank = (parallel_state.get_tensor_model_parallel_world_size(),
                      parallel_state.get_tensor_model_parallel_rank())  # fmt: skip
        share = -(-vocab_size // size)
        self.group = parallel_state.get_tensor_model_parallel_group()
        self.size = size
        self.start = share * rank
        self.rows = min(share, vocab_size - self.start)

    def head(self, piece: GPTModel) -> Head:
        """This rank's part of the output layer of the last stage."""
        tied = piece.share_embeddings_and_output_weights
        weight = piece.shared_embedding_or_output_weight() if tied else piece.output_layer.weight
        return Head(weight=weight if len(weight) == self.rows else weight[: self.rows])

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks."""
        return self._reduced(tensor, dist.ReduceOp.SUM)

    def max(self, tensor: Tensor) -> Tensor:
        """The maximum over the ranks."""
        return self._reduced(tensor, dist.ReduceOp.MAX)

    def _reduced(self, tensor: Tensor, operation: Any) -> Tensor:
        tensor = tensor.clone()
        dist.all_reduce(tensor, op=operation, group=self.group)
        return tensor


def over_context_ranks(own: Tensor) -> Tensor:
    """The sum of what ranks of context parallelism have, each zero where others have something.

    The gradient of it is the gradient of this rank's part: others compute the same loss from theirs.
    """
    if parallel_state.get_context_parallel_world_size() == 1:
        return own
    others = own.detach().clone()
    dist.all_reduce(others, group=parallel_state.get_context_parallel_group())
    return own + (others - own.detach())
