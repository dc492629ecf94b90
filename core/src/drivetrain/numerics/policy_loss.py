"""Loss terms: pure functions of a micro-batch, whose SUM over micro-batches and ranks is the loss.

Tensors are (rows, response); `batch["response_mask"]` selects the tokens, `counts` are those of the whole mini-batch,
`aggregation` and `scale` those of `aggregate`. KeyError: a column is missing; ValueError: an output, or a bad option.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drivetrain.metrics import Max, Mean, Metric
from drivetrain.numerics.loss import Batch, Counts, LossInputs, LossResult, aggregate
from drivetrain.numerics.masked import fill_masked, masked_sum
from drivetrain.numerics.ratios import MAX_LOG_RATIO, kl_penalty


def clip(
    outputs: LossInputs,
    batch: Batch,
    counts: Counts,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_dual: float | None = None,
    aggregation: str = "token-mean",
    scale: float | None = None,
) -> LossResult:
    """PPO's clipped surrogate. With r = exp(log pi - log pi_old), A the advantage, w the importance weight, per token

        L = w max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))       and, where A < 0 and `clip_dual` = c > 1,
        L = w min(max(...), -A c)

    Schulman et al. 2017 (arXiv:1707.06347), equation 7; `clip_high` > `clip_low`: DAPO (arXiv:2503.14476, section 3.1);
    `clip_dual`: Ye et al. 2020 (arXiv:1912.09729). log r is clamped to [-20, 20], beyond which its gradient is 0.
    Columns: old_log_probs, advantages, optional rollout_is_weights. Metrics: clip_fraction (tokens where the clipped
    side is the larger), clip_fraction_dual, approx_kl (mean of log pi_old - log pi), ratio_max.
    """
    if clip_dual is not None and not clip_dual > 1:
        raise ValueError(f"clip_dual must be greater than 1; got {clip_dual}")
    mask = batch["response_mask"]
    advantages = fill_masked(batch["advantages"], mask)
    log_ratio = fill_masked(outputs.require("log_probs") - batch["old_log_probs"], mask)
    log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    plain, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(plain, clipped)
    metrics: dict[str, Metric] = {
        "clip_fraction": token_mean(clipped > plain, mask),
        "approx_kl": token_mean(-log_ratio, mask),
        "ratio_max": Max(fill_masked(ratio, mask).amax() if ratio.numel() else 0.0),
    }
    if clip_dual is not None:
        ceiling = -advantages * clip_dual
        metrics["clip_fraction_dual"] = token_mean((advantages < 0) & (loss > ceiling), mask)
        loss = torch.where(advantages < 0, torch.minimum(loss, ceiling), loss)
    return LossResult(loss=aggregate(weighted(loss, batch), mask, aggregation, counts, scale=scale), metrics=metrics)


def policy_gradient(
    outputs: LossInputs, batch: Batch, counts: Counts, *, aggregation: str = "token-mean", scale: float | None = None
) -> LossResult:
    """REINFORCE: w (-A log pi) per token, w the importance weight. Williams 1992 (Machine Learning 8), section 4.

    Columns: advantages, optional rollout_is_weights.
    """
    mask = batch["response_mask"]
    loss = -fill_masked(batch["advantages"], mask) * fill_masked(outputs.require("log_probs"), mask)
    return LossResult(loss=aggregate(weighted(loss, batch), mask, aggregation, counts, scale=scale))


def kl_to_ref(
    outputs: LossInputs,
    batch: Batch,
    counts: Counts,
    *,
    kind: str = "k3",
    aggregation: str = "token-mean",
    scale: float | None = None,
) -> LossResult:
    """The aggregated `kl_penalty(log_probs, ref_log_probs, kind)`; column ref_log_probs; metric kl, its token mean."""
    mask = batch["response_mask"]
    log_probs, ref_log_probs = (fill_masked(x, mask) for x in (outputs.require("log_probs"), batch["ref_log_probs"]))
    kl = kl_penalty(log_probs, ref_log_probs, kind)
    return LossResult(loss=aggregate(kl, mask, aggregation, counts, scale=scale), metrics={"kl": token_mean(kl, mask)})


def entropy_bonus(
    outputs: LossInputs, batch: Batch, counts: Counts, *, aggregation: str = "token-mean", scale: float | None = None
) -> LossResult:
    """MINUS the aggregated entropy (arXiv:1707.06347, equation 9); metric entropy, its token mean, in nats."""
    mask, entropy = batch["response_mask"], outputs.require("entropy")
    loss = -aggregate(entropy, mask, aggregation, counts, scale=scale)
    return LossResult(loss=loss, metrics={"entropy": token_mean(entropy, mask)})


def value_clip(
    outputs: LossInputs,
    batch: Batch,
    counts: Counts,
    *,
    clip_range: float = 0.5,
    aggregation: str = "token-mean",
    scale: float | None = None,
) -> LossResult:
    """The critic's clipped loss. With V the new and V_old the old value and R the return, per token

        L = max((V - R)^2, (clip(V, V_old - clip_range, V_old + clip_range) - R)^2) / 2

    Huang et al. 2022 (The 37 Implementation Details of Proximal Policy Optimization), detail 9. Columns: values
    (V_old), returns. Metric: value_clip_fraction (tokens where the clipped side is the larger).
    """
    if not clip_range >= 0:
        raise ValueError(f"clip_range must not be negative; got {clip_range}")
    mask = batch["response_mask"]
    columns = (outputs.require("values"), batch["values"], batch["returns"])
    values, old, returns = (fill_masked(column, mask) for column in columns)
    plain = (values - returns).square()
    clipped = (values.clamp(old - clip_range, old + clip_range) - returns).square()
    loss = aggregate(torch.maximum(plain, clipped) / 2, mask, aggregation, counts, scale=scale)
    return LossResult(loss=loss, metrics={"value_clip_fraction": token_mean(clipped > plain, mask)})


def token_mean(values: Tensor, mask: Tensor) -> Mean:
    """A metric: counted over this micro-batch, so that merging over all of them is exact."""
    return Mean(masked_sum(values.detach(), mask), (mask != 0).sum())


def weighted(loss: Tensor, batch: Batch) -> Tensor:
    """The loss of each token times the optional column `rollout_is_weights`."""
    if "rollout_is_weights" not in batch:
        return loss
    return loss * fill_masked(batch["rollout_is_weights"], batch["response_mask"])
