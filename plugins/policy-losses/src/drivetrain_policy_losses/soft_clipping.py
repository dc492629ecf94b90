"""Losses that weigh a token down where its ratio is far from 1, and keep its gradient."""

from __future__ import annotations

import torch

from drivetrain.numerics import Counts, LossInputs, LossResult, aggregate, fill_masked, token_mean, weighted
from drivetrain.numerics.loss import Batch
from drivetrain_policy_losses.shared import ratio_metrics, token_log_ratio


def cispo(
    outputs: LossInputs,
    batch: Batch,
    counts: Counts,
    *,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
    aggregation: str = "token-mean",
    scale: float | None = None,
) -> LossResult:
    """CISPO (MiniMax-M1, arXiv:2506.13585, equations 4 and 5). With r = exp(log pi - log pi_old), per token

        L = -sg[clip(r, 1 - clip_low, 1 + clip_high)] A log pi

    where sg stops the gradient. A `clip_low` of 1 or more bounds nothing from below, as in the paper. Columns:
    old_log_probs, advantages, optional rollout_is_weights. Metrics: clip_fraction (tokens whose ratio was cut),
    approx_kl, ratio_max.
    """
    mask = batch["response_mask"]
    advantages, log_probs = (fill_masked(x, mask) for x in (batch["advantages"], outputs.require("log_probs")))
    log_ratio = token_log_ratio(log_probs, batch).detach()
    ratio = log_ratio.exp()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = weighted(-weight * advantages * log_probs, batch)
    metrics = {"clip_fraction": token_mean(weight != ratio, mask), **ratio_metrics(log_ratio, ratio, mask)}
    return LossResult(loss=aggregate(loss, mask, aggregation, counts, scale=scale), metrics=metrics)


def sapo(
    outputs: LossInputs,
    batch: Batch,
    counts: Counts,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
    aggregation: str = "seq-mean-token-mean",
    scale: float | None = None,
) -> LossResult:
    """SAPO (arXiv:2511.20347). With r = exp(log pi - log pi_old), per token

        L = -A sigmoid(tau (r - 1)) 4 / tau              tau = tau_pos where A > 0, else tau_neg

    whose derivative by r is -A times a gate that is 1 at r = 1 and falls on both sides. Columns: old_log_probs,
    advantages, optional rollout_is_weights. Metrics: gate (its mean over tokens), approx_kl, ratio_max. ValueError: a
    tau is not positive.
    """
    if not (tau_pos > 0 and tau_neg > 0):
        raise ValueError(f"tau_pos and tau_neg must be positive; got {tau_pos} and {tau_neg}")
    mask = batch["response_mask"]
    advantages = fill_masked(batch["advantages"], mask)
    log_ratio = token_log_ratio(outputs.require("log_probs"), batch)
    ratio = log_ratio.exp()
    tau = torch.full_like(advantages, tau_neg).masked_fill(advantages > 0, tau_pos)
    soft = torch.sigmoid(tau * (ratio - 1))
    loss = weighted(-advantages * soft * 4 / tau, batch)
    metrics = {"gate": token_mean(4 * soft * (1 - soft), mask), **ratio_metrics(log_ratio, ratio, mask)}
    return LossResult(loss=aggregate(loss, mask, aggregation, counts, scale=scale), metrics=metrics)
