"""What algorithms have in common which weigh log-probs of samples with advantages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from drivetrain.contracts.algorithm import Algorithm, LossTerm
from drivetrain.driver.advantage import compute_advantage
from drivetrain.errors import UserError
from drivetrain.metrics import Max, Mean, Metric, merge_metrics
from drivetrain.numerics import (
    band_mask,
    effective_sample_size,
    fill_masked,
    kl_penalty,
    masked_mean,
    masked_sum,
    truncated_weights,
)
from drivetrain.seam.registry import get_registry
from drivetrain.seam.specs import AdvantageEstimatorSpec

if TYPE_CHECKING:
    from drivetrain.config import PolicyGradientConfig
    from drivetrain.driver.roles import Roles
    from drivetrain.protocol import DataProto


class PolicyGradient(Algorithm):
    """The pieces that ``collect`` is written with, and a ``learn`` of some epochs of mini-batches.

    A subclass writes ``collect``, and overrides what it does differently.
    """

    config: PolicyGradientConfig

    def notes(self, roles: Roles) -> Sequence[str]:
        c = self.config
        if c.rollout_is != "auto" or c.old_log_probs == "rollout" or c.correction(shared=False) != "none":
            return ()
        said = (f"rollout_is auto comes to none: policy loss {c.policy_loss!r} reads no importance weights, so nothing "
                "corrects for what tells the rollout's policy from the trainer's")  # fmt: skip
        return () if roles.rollout.shares_weights else (said,)

    def sample(self, roles: Roles, prompts: DataProto) -> DataProto:
        """Scored completions, ``group_size`` of each prompt.

        For an estimator that needs them with ``reward_baselines`` (rows,): the score of the greedy completion of the
        row's prompt.
        """
        batch = roles.rewards.score(roles.rollout.generate(prompts, samples=self.config.group_size))
        spec = get_registry().select("advantage_estimators", self.config.advantage).spec
        if "reward_baselines" in cast(AdvantageEstimatorSpec, spec).needs:
            greedy = roles.rewards.score(roles.rollout.generate(prompts, temperature=0.0, phase="baseline"))
            baseline = dict(zip(greedy["uid"].tolist(), greedy["scores"].tolist()))
            batch = batch.with_columns(reward_baselines=torch.tensor([baseline[uid] for uid in batch["uid"].tolist()]))
        return batch

    def log_probs(self, roles: Roles, batch: DataProto) -> DataProto:
        """The batch with what the objective needs of the models: ``old_log_probs``; ``ref_log_probs`` where the KL
        divergence is charged; ``rollout_is_weights`` where the loss is weighed; each (rows, response)."""
        c = self.config
        if c.kl_coef > 0:
            batch = roles.ref.log_probs(batch)
        if c.old_log_probs == "rollout":
            return batch.with_columns(old_log_probs=batch["rollout_log_probs"])
        batch = roles.actor.log_probs(batch)
        level = c.correction(roles.rollout.shares_weights)
        if level == "none" and not c.bands:
            return batch
        mask, log_ratio = batch["response_mask"], batch["old_log_probs"] - batch["rollout_log_probs"]
        weights = (mask != 0).to(log_ratio)
        if level != "none":
            weights = truncated_weights(log_ratio, mask, level, c.rollout_is_threshold)
        for at, bounds in c.bands.items():
            weights = weights * band_mask(log_ratio, mask, at, *bounds)
        return batch.with_columns(rollout_is_weights=weights)

    def advantages(self, batch: DataProto) -> DataProto:
        """The batch with ``advantages`` and ``returns``, by the estimator of the config.

        Raises:
            drivetrain.UserError: an option has a value that the estimator refuses.
        """
        name, options = self.config.advantage, self.config.advantage_options()
        try:
            return compute_advantage(batch, name, **options)
        except ValueError as error:
            raise UserError(f"advantage estimator {name!r}: {error}", where="algorithm.advantage_args",
                            mend=f"mend its options: {options}") from error  # fmt: skip

    def kl(self, batch: DataProto) -> Tensor:
        """KL divergence of each token from the reference policy, zero beyond the mask (rows, response)."""
        kl = kl_penalty(batch["old_log_probs"], batch["ref_log_probs"], self.config.kl_kind)
        return fill_masked(kl, batch["response_mask"])

    def learn(self, roles: Roles, batch: DataProto) -> dict[str, Metric]:
        metrics = [self.batch_metrics(batch)]
        for epoch in range(self.config.epochs):
            for mini_batch in roles.actor.mini_batches(batch, epoch):
                metrics.append(roles.actor.update(mini_batch, *self.loss_terms("actor")))
        return merge_metrics(metrics)

    def loss_terms(self, role: str) -> Sequence[LossTerm]:
        c = self.config
        shared: dict[str, Any] = {"aggregation": c.aggregation, "scale": c.scale}
        return (
            LossTerm(c.policy_loss, args=c.policy_loss_options()),
            LossTerm("kl", weight=c.kl_coef, args={"kind": c.kl_kind, **shared}),
            LossTerm("entropy", weight=c.entropy_coef, args=shared),
        )

    def batch_metrics(self, batch: DataProto) -> dict[str, Metric]:
        """What the terms of the objective do not tell by themselves."""
        c, mask = self.config, batch["response_mask"]
        tokens = mask.sum()
        metrics: dict[str, Metric] = {}
        if c.entropy_coef == 0:
            # exact where log-probs were recomputed; else estimated from the drawn tokens, as the mean of -log p
            entropy = batch["entropy"] if "entropy" in batch else -batch["rollout_log_probs"]
            metrics["entropy"] = Mean(masked_sum(entropy, mask), tokens)
        return metrics | self._rollout_metrics(batch) if c.old_log_probs == "recompute" else metrics

    def _rollout_metrics(self, batch: DataProto) -> dict[str, Metric]:
        """How far the trainer is from the rollout before the update, and what became of the weights."""
        c, mask = self.config, batch["response_mask"]
        rollout, trainer = batch["rollout_log_probs"], batch["old_log_probs"]
        log_ratio = fill_masked(trainer - rollout, mask)
        tokens, rows = (mask != 0).sum(), (mask != 0).any(dim=-1).sum()

        def share(chosen: Tensor, level: str) -> Mean:
            return Mean(chosen.any(dim=-1).sum(), rows) if level == "sequence" else Mean(chosen.sum(), tokens)

        metrics: dict[str, Metric] = {
            "rollout_mismatch": Mean(log_ratio.abs().sum(), tokens),
            "rollout_mismatch_max": Max(log_ratio.abs().max()),
            "rollout_kl": Mean(masked_sum(kl_penalty(rollout, trainer, "k3"), mask), tokens),
            "rollout_ppl_ratio": Mean((-masked_mean(log_ratio, mask)).exp(), 1),
            "rollout_ess": Mean(effective_sample_size(log_ratio, mask), 1),
        }
        if "rollout_is_weights" in batch:
            metrics["rollout_is_weight"] = Mean(masked_sum(batch["rollout_is_weights"], mask), tokens)
            if (level := c.correction(shared=False)) != "none":
                cut = truncated_weights(log_ratio, mask, level, c.rollout_is_threshold) == c.rollout_is_threshold
                metrics["rollout_truncated"] = share(cut, level)
        for level, bounds in c.bands.items():
            outside = (mask != 0) & ~band_mask(log_ratio, mask, level, *bounds)
            metrics["rollout_rejected" if level == "sequence" else "rollout_masked"] = share(outside, level)
        return metrics
