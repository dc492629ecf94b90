"""The numbers of reinforcement learning: pure functions of tensors; what the response mask hides never matters."""

from drivetrain.numerics.advantages import discounted_returns, gae, gae_advantage, group_advantage
from drivetrain.numerics.loss import AGGREGATIONS, Counts, LossInputs, LossResult, aggregate
from drivetrain.numerics.masked import (
    fill_masked,
    group_index,
    group_mean_std,
    masked_mean,
    masked_std,
    masked_sum,
    masked_var,
    masked_whiten,
)
from drivetrain.numerics.policy_loss import (
    clip,
    entropy_bonus,
    kl_to_ref,
    policy_gradient,
    token_mean,
    value_clip,
    weighted,
)
from drivetrain.numerics.ratios import (
    KL_KINDS,
    MAX_LOG_RATIO,
    band_mask,
    effective_sample_size,
    kl_penalty,
    truncated_weights,
)

__all__ = [
    "AGGREGATIONS", "KL_KINDS", "MAX_LOG_RATIO", "Counts", "LossInputs", "LossResult", "aggregate", "band_mask", "clip",
    "discounted_returns", "effective_sample_size", "entropy_bonus", "fill_masked", "gae", "gae_advantage",
    "group_advantage", "group_index", "group_mean_std", "kl_penalty", "kl_to_ref", "masked_mean", "masked_std",
    "masked_sum", "masked_var", "masked_whiten", "policy_gradient", "token_mean", "truncated_weights", "value_clip",
    "weighted",
]  # fmt: skip
