"""The numbers of reinforcement learning: pure functions of tensors. Every one takes the response mask, and what it
hides never matters."""

from drivetrain.numerics.advantages import gae_advantage, group_advantage
from drivetrain.numerics.aggregate import AGGREGATIONS, aggregate
from drivetrain.numerics.counts import Counts
from drivetrain.numerics.gae import discounted_returns, gae, reverse_scan
from drivetrain.numerics.groups import group_index, group_mean_std
from drivetrain.numerics.importance import truncated_weights
from drivetrain.numerics.kl import KL_KINDS, kl_penalty
from drivetrain.numerics.loss_types import LossInputs, LossResult
from drivetrain.numerics.masked import fill_masked, masked_mean, masked_std, masked_sum, masked_var, masked_whiten
from drivetrain.numerics.policy_loss import clip, entropy_bonus, kl_to_ref, value_clip

__all__ = [
    "AGGREGATIONS",
    "KL_KINDS",
    "Counts",
    "LossInputs",
    "LossResult",
    "aggregate",
    "clip",
    "discounted_returns",
    "entropy_bonus",
    "fill_masked",
    "gae",
    "gae_advantage",
    "group_advantage",
    "group_index",
    "group_mean_std",
    "kl_penalty",
    "kl_to_ref",
    "masked_mean",
    "masked_std",
    "masked_sum",
    "masked_var",
    "masked_whiten",
    "reverse_scan",
    "truncated_weights",
    "value_clip",
]
