"""What these losses have in common: the log-ratio of a token, and metrics of ratios.

Tensors are (rows, response), `batch["response_mask"]` selects the tokens, `counts` are those of the whole mini-batch.
"""

from __future__ import annotations

from torch import Tensor

from drivetrain.metrics import Max, Metric
from drivetrain.numerics import MAX_LOG_RATIO, fill_masked, token_mean
from drivetrain.numerics.loss import Batch


def token_log_ratio(log_probs: Tensor, batch: Batch) -> Tensor:
    """log pi - log pi_old, clamped to [-20, 20], beyond which its gradient is 0; 0 where masked."""
    return fill_masked(log_probs - batch["old_log_probs"], batch["response_mask"]).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def ratio_metrics(log_ratio: Tensor, ratio: Tensor, mask: Tensor) -> dict[str, Metric]:
    """`approx_kl`, the mean of log pi_old - log pi over tokens, and `ratio_max`, of the ratios that the loss uses."""
    largest = fill_masked(ratio, mask).amax() if ratio.numel() else 0.0
    return {"approx_kl": token_mean(-log_ratio, mask), "ratio_max": Max(largest)}
