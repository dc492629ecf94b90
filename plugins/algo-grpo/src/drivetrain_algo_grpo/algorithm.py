"""GRPO: DeepSeekMath (arXiv 2402.03300), algorithm 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from drivetrain import LossTerm, PolicyGradient
from drivetrain.metrics import Mean, Metric
from drivetrain_algo_grpo.config import GRPOConfig

if TYPE_CHECKING:
    from drivetrain import DataProto, Roles


class GRPO(PolicyGradient):
    """Group relative policy optimization.

    For each prompt q draw G answers o_1..o_G from the policy, score them, and let
    ``A_i = (r_i - mean(r)) / (std(r) + epsilon)`` be the advantage of every token of o_i. Maximise the clipped
    objective of these advantages, less ``kl_coef`` times the KL divergence from the reference policy.
    """

    config: GRPOConfig

    def collect(self, roles: Roles, prompts: DataProto) -> DataProto:
        batch = self.log_probs(roles, self.sample(roles, prompts))
        rewards = batch["token_level_scores"]
        if self._kl_in_reward:
            rewards = rewards - self.config.kl_coef * self.kl(batch)
        return self.advantages(batch.with_columns(token_level_rewards=rewards))

    def loss_terms(self, role: str) -> Sequence[LossTerm]:
        terms = super().loss_terms(role)
        return [term for term in terms if term.name != "kl"] if self._kl_in_reward else terms

    def batch_metrics(self, batch: DataProto) -> dict[str, Metric]:
        metrics = super().batch_metrics(batch)
        if self._kl_in_reward:
            metrics["kl"] = Mean(self.kl(batch).sum(), batch["response_mask"].sum())
        return metrics

    @property
    def _kl_in_reward(self) -> bool:
        return self.config.kl_coef > 0 and self.config.kl_in == "reward"
