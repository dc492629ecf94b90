"""Losses whose ratio is that of a whole sequence. Each is the mean over sequences: a sequence counts once."""

from __future__ import annotations

import torch

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


def gspo(
    outputs: LossInputs, batch: Batch, counts: Counts, *, clip_low: float = 3e-4, clip_high: float = 4e-4
) -> LossResult:
    """GSPO (arXiv:2507.18071). With l_t = log pi - log pi_old of a token and n tokens in the sequence

        s = exp(sum_t l_t / n)                           equation 7
        s_t = sg[s] pi_t / sg[pi_t]                      equation 14: the value of s, the gradient of this token
        L_t = max(-A_t s_t, -A_t clip(s_t, 1 - clip_low, 1 + clip_high))                 equations 5 and 13

    L = sum_i (sum_t L_it / n_i) / S over S sequences, which for advantages that are equal along a sequence is GSPO and
    else its variant GSPO-token. `s` stays near 1: ranges are hundreds of times narrower than those of a token's ratio.
    Columns: old_log_probs, advantages, optional rollout_is_weights. Metrics: clip_fraction (tokens where the clipped
    side is the larger), approx_kl, ratio_max (of s). A sequence without a token adds nothing.
    """
    mask = batch["response_mask"]
    advantages, log_probs = (fill_masked(x, mask) for x in (batch["advantages"], outputs.require("log_probs")))
    log_ratio = token_log_ratio(log_probs, batch).detach()
    ratio = (log_probs - log_probs.detach() + masked_mean(log_ratio, mask, dim=-1).unsqueeze(-1)).exp()
    plain, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = weighted(torch.maximum(plain, clipped), batch)
    metrics = {"clip_fraction": token_mean(clipped > plain, mask), **ratio_metrics(log_ratio, ratio, mask)}
    return LossResult(loss=aggregate(loss, mask, "seq-mean-token-mean", counts), metrics=metrics)


def gmpo(
    outputs: LossInputs, batch: Batch, counts: Counts, *, clip_low: float = 0.4, clip_high: float = 0.4
) -> LossResult:
    """GMPO (arXiv:2507.20673, section 3). With l_t as above, A the mean advantage of the sequence

        c_t = min(l_t, clip_high) where A_t >= 0, else max(l_t, -clip_low)          in nats: ratios e^-0.4 to e^0.4
        L_i = -A exp(sum_t c_t / n)                                                 L = sum_i L_i / S

    A sequence is weighted by the geometric mean of its tokens' importance weights. Columns: old_log_probs, advantages,
    optional rollout_is_weights. Metrics: clip_fraction (tokens whose ratio was cut), approx_kl, ratio_max (of a
    sequence). A sequence without a token adds nothing.
    """
    mask = batch["response_mask"]
    advantages = fill_masked(batch["advantages"], mask)
    log_ratio = token_log_ratio(outputs.require("log_probs"), batch)
    cut = torch.where(advantages >= 0, log_ratio.clamp(max=clip_high), log_ratio.clamp(min=-clip_low))
    ratio = masked_mean(cut, mask, dim=-1).exp()
    loss = -masked_mean(advantages, mask, dim=-1) * ratio
    if "rollout_is_weights" in batch:
        loss = loss * masked_mean(fill_masked(batch["rollout_is_weights"], mask, 1.0).log(), mask, dim=-1).exp()
    metrics = {
        "clip_fraction": token_mean(cut != log_ratio, mask),
        **ratio_metrics(log_ratio, ratio.unsqueeze(-1).expand_as(cut), mask),
    }
    of_tokens = loss.unsqueeze(-1).expand_as(cut)  # whose mean over a sequence is the sequence's loss
    return LossResult(loss=aggregate(of_tokens, mask, "seq-mean-token-mean", counts), metrics=metrics)
