"""What these losses have in common: the log-ratio of a token, the weights of the rollout, and metrics.

Tensors are (rows, response), `batch["response_mask"]` selects the tokens, `counts` are those of the whole mini-batch.
"""

from __future__ import annotations

from torch import Tensor

from drivetrain.metrics import Max, Mean, Metric
from drivetrain.numerics import fill_masked, masked_sum
from drivetrain.numerics.loss import Batch

MAX_LOG_RATIO = 20.0  # as in core's `clip`: finite in every dtype, and far outside what related policies give


def token_log_ratio(log_probs: Tensor, batch: Batch) -> Tensor:
    """log pi - log pi_old, clamped to [-20, 20], beyond which its gradient is 0; 0 where masked."""
    return fill_masked(log_probs - batch["old_log_probs"], batch["response_mask"]).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def weighted(loss: Tensor, batch: Batch) -> Tensor:
    """The loss of each token times the optional column `rollout_is_weights`."""
    if "rollout_is_weights" not in batch:
        return loss
    return loss * fill_masked(batch["rollout_is_weights"], batch["response_mask"])


def token_mean(values: Tensor, mask: Tensor) -> Mean:
    """Counted over this micro-batch, so that merging over all of them is exact."""
    return Mean(masked_sum(values.detach(), mask), (mask != 0).sum())


def ratio_metrics(log_ratio: Tensor, ratio: Tensor, mask: Tensor) -> dict[str, Metric]:
    """`approx_kl`, the mean of log pi_old - log pi over tokens, and `ratio_max`, of the ratios that the loss uses."""
    largest = fill_masked(ratio, mask).amax() if ratio.numel() else 0.0
    return {"approx_kl": token_mean(-log_ratio, mask), "ratio_max": Max(largest)}
