"""Losses that hold back the tokens that lower the entropy most: those of high covariance (arXiv:2505.22617).

    C_t = (A_t - mean A) (log pi_t - mean log pi)                means over the tokens of the whole mini-batch

Which tokens are chosen depends on all of the mini-batch (scope `batch`) and on nothing else: no state of a random
generator enters, and with the rows the choice is permuted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drivetrain.numerics import (
    Counts,
    LossInputs,
    LossResult,
    aggregate,
    fill_masked,
    masked_mean,
    token_mean,
    weighted,
)
from drivetrain.numerics.loss import Batch
from drivetrain_policy_losses.shared import ratio_metrics, token_log_ratio


def clip_cov(
    outputs: LossInputs,
    batch: Batch,
    counts: Counts,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    cov_fraction: float = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
    aggregation: str = "token-mean",
    scale: float | None = None,
) -> LossResult:
    """Clip-Cov (arXiv:2505.22617, section 4.2). With r = exp(log pi - log pi_old) and N tokens, per token

        L = 0 for k = max(floor(cov_fraction N), 1) tokens drawn from those with cov_low < C_t < cov_high
        L = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) for all others, as in `clip`

    Tokens that the ratio's clipping has cut are not drawn. The draw is by pseudo-random keys that are hashed from the
    bits of a token's own old log-prob and advantage; tokens of equal numbers that would overfill k are left out, and
    if none is eligible none is drawn. Columns: old_log_probs, advantages, optional rollout_is_weights. Metrics:
    clip_fraction (of the ratio), cov_fraction (tokens drawn), approx_kl, ratio_max. ValueError: cov_fraction is
    outside [0, 1].
    """
    mask = batch["response_mask"]
    advantages, log_probs = (fill_masked(x, mask) for x in (batch["advantages"], outputs.require("log_probs")))
    log_ratio = token_log_ratio(log_probs, batch)
    ratio = log_ratio.exp()
    plain, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    cov = _covariance(advantages, log_probs, mask)
    eligible = (mask != 0) & (clipped <= plain) & (cov > cov_low) & (cov < cov_high)
    keys = _random_keys(fill_masked(batch["old_log_probs"], mask), advantages)
    drawn = _top(keys, eligible, _number(cov_fraction, counts))
    loss = weighted(torch.where(drawn, 0.0, torch.maximum(plain, clipped)), batch)
    metrics = {
        "clip_fraction": token_mean(clipped > plain, mask),
        "cov_fraction": token_mean(drawn, mask),
        **ratio_metrics(log_ratio, ratio, mask),
    }
    return LossResult(loss=aggregate(loss, mask, aggregation, counts, scale=scale), metrics=metrics)


def kl_cov(
    outputs: LossInputs,
    batch: Batch,
    counts: Counts,
    *,
    cov_fraction: float = 2e-4,
    cov_kl_coef: float = 1.0,
    aggregation: str = "token-mean",
    scale: float | None = None,
) -> LossResult:
    """KL-Cov (arXiv:2505.22617, section 4.2). With r = exp(log pi - log pi_old) and N tokens, per token

        L = -A r + cov_kl_coef |log r| for the k = max(floor(cov_fraction N), 1) tokens of the largest C_t
        L = -A r for all others

    |log r| stands for the KL divergence from the old policy, as in the authors' code: its gradient leads back to the
    old policy from both sides. Tokens that tie for the last of the k places are left out: where all advantages are
    equal, no token pays. Columns: old_log_probs, advantages, optional rollout_is_weights. Metrics: cov_fraction (tokens
    that pay), approx_kl, ratio_max. ValueError: cov_fraction is outside [0, 1].
    """
    mask = batch["response_mask"]
    advantages, log_probs = (fill_masked(x, mask) for x in (batch["advantages"], outputs.require("log_probs")))
    log_ratio = token_log_ratio(log_probs, batch)
    ratio = log_ratio.exp()
    paying = _top(_covariance(advantages, log_probs, mask), mask != 0, _number(cov_fraction, counts))
    loss = weighted(-advantages * ratio + torch.where(paying, cov_kl_coef * log_ratio.abs(), 0.0), batch)
    metrics = {"cov_fraction": token_mean(paying, mask), **ratio_metrics(log_ratio, ratio, mask)}
    return LossResult(loss=aggregate(loss, mask, aggregation, counts, scale=scale), metrics=metrics)


def _covariance(advantages: Tensor, log_probs: Tensor, mask: Tensor) -> Tensor:
    log_probs = log_probs.detach()
    return (advantages - masked_mean(advantages, mask)) * (log_probs - masked_mean(log_probs, mask))


def _number(fraction: float, counts: Counts) -> int:
    if not 0 <= fraction <= 1:
        raise ValueError(f"cov_fraction must lie between 0 and 1; got {fraction}")
    return max(int(fraction * counts.tokens), 1)


def _top(values: Tensor, eligible: Tensor, number: int) -> Tensor:
    """Where at most `number` eligible tokens have a value as large as the token's own: ties at the border are out."""
    values = torch.where(eligible, values, -torch.inf)
    ascending = values.flatten().sort().values
    as_large = values.numel() - torch.searchsorted(ascending, values.contiguous())
    return eligible & (as_large <= number)


def _random_keys(*numbers: Tensor) -> Tensor:
    """float64 keys, hashed from the bits of each token's numbers by the finalizer of MurmurHash3 (A. Appleby)."""
    key = torch.zeros_like(numbers[0], dtype=torch.int64)
    for column in numbers:
        key = key ^ column.detach().double().contiguous().view(torch.int64)
        for factor in (0xFF51AFD7ED558CCD - 2**64, 0xC4CEB9FE1A85EC53 - 2**64):  # products wrap
            key = (key ^ ((key >> 33) & 0x7FFFFFFF)) * factor
        key = key ^ ((key >> 33) & 0x7FFFFFFF)
    return key.double()
