"""Policy gradient that a quadratic penalty keeps near the policy that sampled."""

from __future__ import annotations

from drivetrain.numerics import (
    Counts,
    LossInputs,
    LossResult,
    aggregate,
    fill_masked,
    masked_mean,
    masked_sum,
    token_mean,
    weighted,
)
from drivetrain.numerics.loss import Batch
from drivetrain_policy_losses.shared import ratio_metrics, token_log_ratio


def dro(
    outputs: LossInputs,
    batch: Batch,
    counts: Counts,
    *,
    beta: float = 0.05,
    level: str = "sequence",
    aggregation: str = "token-mean",
    scale: float | None = None,
) -> LossResult:
    """DRO. With l_t = log pi - log pi_old of a token and n tokens in the sequence, per token

        L_t = -A_t log pi_t + beta/2 (sum_s l_s)^2 / n          level `sequence`
        L_t = -A_t log pi_t + beta/2 l_t^2                      level `token`

    `sequence`: the sum over a sequence is -A log pi(y) + beta/2 (log pi(y)/pi_old(y))^2, Kimi k1.5 (arXiv:2501.12599,
    section 2.3.2, with tau = beta and A = r - mean r), which but for a constant is the square (r - V -
    beta log pi/pi_old)^2 / (2 beta) of DRO (arXiv:2405.19107) with the mean reward as value V. `token`: the loss `dro`
    of Tinker. Aggregation `seq-mean-token-sum` is the papers'. Columns: old_log_probs, advantages, optional
    rollout_is_weights. Metrics: quadratic_penalty (mean over tokens of the second summand), approx_kl, ratio_max.
    ValueError: unknown level, beta negative.
    """
    if level not in ("token", "sequence"):
        raise ValueError(f"unknown level {level!r}; choose from token, sequence")
    if not beta >= 0:
        raise ValueError(f"beta must not be negative; got {beta}")
    mask = batch["response_mask"]
    advantages, log_probs = (fill_masked(x, mask) for x in (batch["advantages"], outputs.require("log_probs")))
    log_ratio = token_log_ratio(log_probs, batch)
    square = log_ratio.square()
    if level == "sequence":
        of_rows = masked_sum(log_ratio, mask, dim=-1) * masked_mean(log_ratio, mask, dim=-1)
        square = of_rows.unsqueeze(-1).expand_as(square)
    penalty = beta / 2 * square
    loss = weighted(-advantages * log_probs + penalty, batch)
    metrics = {
        "quadratic_penalty": token_mean(penalty, mask),
        **ratio_metrics(log_ratio, log_ratio.exp(), mask),
    }
    return LossResult(loss=aggregate(loss, mask, aggregation, counts, scale=scale), metrics=metrics)
