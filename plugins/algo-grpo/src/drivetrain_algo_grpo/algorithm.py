"""GRPO: DeepSeekMath (arXiv 2402.03300), algorithm 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from drivetrain import Algorithm, LossTerm, compute_advantage
from drivetrain.metrics import Mean, Metric, merge_metrics
from drivetrain.numerics import fill_masked, kl_penalty, masked_sum
from drivetrain_algo_grpo.config import GRPOConfig

if TYPE_CHECKING:
    from torch import Tensor

    from drivetrain import DataProto, Roles


class GRPO(Algorithm):
    """Group relative policy optimization.

    For each prompt q draw G answers o_1..o_G from the policy, score them, and let
    ``A_i = (r_i - mean(r)) / (std(r) + epsilon)`` be the advantage of every token of o_i. Maximise the clipped
    objective of these advantages, less ``kl_coef`` times the KL divergence from the reference policy.
    """

    config: GRPOConfig

    def collect(self, roles: Roles, prompts: DataProto) -> DataProto:
        c = self.config
        batch = roles.rollout.generate(prompts, samples=c.group_size)
        batch = roles.rewards.score(batch)
        if c.kl_coef > 0:
            batch = roles.ref.log_probs(batch)
        if c.old_log_probs == "rollout":
            batch = batch.with_columns(old_log_probs=batch["rollout_log_probs"])
        else:
            batch = roles.actor.log_probs(batch)
        rewards = batch["token_level_scores"]
        if c.kl_coef > 0 and c.kl_in == "reward":
            rewards = rewards - c.kl_coef * self._kl(batch)
        batch = batch.with_columns(token_level_rewards=rewards)
        return compute_advantage(batch, c.advantage, **c.advantage_options())

    def learn(self, roles: Roles, batch: DataProto) -> dict[str, Metric]:
        metrics = [self._batch_metrics(batch)]
        for epoch in range(self.config.epochs):
            for mini_batch in roles.actor.mini_batches(batch, epoch):
                metrics.append(roles.actor.update(mini_batch, *self.loss_terms("actor")))
        return merge_metrics(metrics)

    def loss_terms(self, role: str) -> Sequence[LossTerm]:
        c = self.config
        shared = {"aggregation": c.aggregation, "scale": c.scale}
        return (
            LossTerm(c.policy_loss, args=c.policy_loss_options()),
            LossTerm("kl", weight=c.kl_coef if c.kl_in == "loss" else 0.0, args={"kind": c.kl_kind, **shared}),
            LossTerm("entropy", weight=c.entropy_coef, args=shared),
        )

    def _kl(self, batch: DataProto) -> Tensor:
        """Per-token KL divergence from the reference policy, zero beyond the mask (rows, response)."""
        kl = kl_penalty(batch["old_log_probs"], batch["ref_log_probs"], self.config.kl_kind)
        return fill_masked(kl, batch["response_mask"])

    def _batch_metrics(self, batch: DataProto) -> dict[str, Metric]:
        """What the terms of the objective do not tell by themselves."""
        c, mask = self.config, batch["response_mask"]
        metrics: dict[str, Metric] = {}
        if c.entropy_coef == 0:
            # exact where log-probs were recomputed; else estimated from the drawn tokens, as the mean of -log p
            entropy = batch["entropy"] if "entropy" in batch else -batch["rollout_log_probs"]
            metrics["entropy"] = Mean(masked_sum(entropy, mask), mask.sum())
        if c.old_log_probs == "recompute":
            difference = (batch["old_log_probs"] - batch["rollout_log_probs"]).abs()
            metrics["rollout_mismatch"] = Mean(masked_sum(difference, mask), mask.sum())
        if c.kl_coef > 0 and c.kl_in == "reward":
            metrics["kl"] = Mean(self._kl(batch).sum(), mask.sum())
        return metrics
