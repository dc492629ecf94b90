"""The loss of supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from drivetrain.metrics import Mean
from drivetrain.numerics import Counts, LossInputs, LossResult, aggregate, masked_sum

if TYPE_CHECKING:
    from torch import Tensor


def nll(
    outputs: LossInputs, batch: Mapping[str, Tensor], counts: Counts, *, aggregation: str = "token-mean"
) -> LossResult:
    """Negative log-likelihood: ``-log p(y_t | x, y_<t)``, aggregated over the tokens of the responses.

    Args:
        outputs: ``log_probs`` (rows, response), in nats.
        batch: ``response_mask`` (rows, response).
        counts: of the whole mini-batch.

    Returns:
        the share, and the metric ``nll`` (mean over tokens, in nats).
    """
    mask = batch["response_mask"]
    losses = -outputs.require("log_probs")
    metrics = {"nll": Mean(masked_sum(losses, mask), mask.sum())}
    return LossResult(loss=aggregate(losses, mask, aggregation, counts), metrics=metrics)
