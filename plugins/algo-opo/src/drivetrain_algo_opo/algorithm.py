"""OPO: Hao et al. 2025 (arXiv 2505.23585)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from drivetrain import Algorithm, LossTerm, compute_advantage
from drivetrain.metrics import Mean, Metric, merge_metrics
from drivetrain.numerics import masked_sum
from drivetrain_algo_opo.config import OPOConfig

if TYPE_CHECKING:
    from drivetrain import DataProto, Roles


class OPO(Algorithm):
    """On-policy reinforcement learning with the optimal reward baseline.

    For each prompt draw K answers y_1..y_K from the policy, score them, and subtract the baseline
    ``b = sum_i l_i r_i / sum_i l_i``, l_i the length of y_i. Take one step up the gradient of
    ``log pi(y_i) (r_i - b)`` and draw again: no ratio, no clipping, no KL divergence, no entropy bonus.
    """

    config: OPOConfig

    def collect(self, roles: Roles, prompts: DataProto) -> DataProto:
        batch = roles.rollout.generate(prompts, samples=self.config.group_size)
        return compute_advantage(roles.rewards.score(batch), "opo")

    def learn(self, roles: Roles, batch: DataProto) -> dict[str, Metric]:
        mask = batch["response_mask"]
        surprise = Mean(masked_sum(-batch["rollout_log_probs"], mask), mask.sum())  # its mean is the entropy
        return merge_metrics([{"entropy": surprise}, roles.actor.update(batch, *self.loss_terms("actor"))])

    def loss_terms(self, role: str) -> Sequence[LossTerm]:
        c = self.config
        return (LossTerm("policy_gradient", args={"aggregation": c.aggregation, "scale": c.scale}),)
