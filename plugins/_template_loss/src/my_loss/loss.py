"""The policy loss my-loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from drivetrain.metrics import Mean
from drivetrain.numerics import Counts, LossInputs, LossResult, aggregate, fill_masked

if TYPE_CHECKING:
    from torch import Tensor


def penalized(
    outputs: LossInputs,
    batch: Mapping[str, Tensor],
    counts: Counts,
    *,
    penalty: float = 0.1,
    aggregation: str = "token-mean",
    scale: float | None = None,
) -> LossResult:
    """``-A r + penalty (log r)^2`` of each token, with ``r = pi / pi_old``, aggregated.

    Args:
        outputs: ``log_probs`` (rows, response), in nats.
        batch: ``advantages``, ``old_log_probs`` and ``response_mask`` (rows, response).
        counts: of the whole mini-batch; ``aggregate`` divides by them.
        penalty: weight of the squared log-ratio.
        aggregation, scale: those of ``aggregate``.

    Returns:
        the share, and the metric ``log_ratio_squared`` (mean over tokens).
    """
    mask = batch["response_mask"]
    advantages = fill_masked(batch["advantages"], mask)
    log_ratio = fill_masked(outputs.require("log_probs") - batch["old_log_probs"], mask)
    losses = -advantages * log_ratio.exp() + penalty * log_ratio.square()
    return LossResult(
        loss=aggregate(losses, mask, aggregation, counts, scale=scale),
        metrics={"log_ratio_squared": Mean(log_ratio.detach().square().sum(), (mask != 0).sum())},
    )
