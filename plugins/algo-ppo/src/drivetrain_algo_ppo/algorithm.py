"""PPO: Schulman et al. 2017 (arXiv 1707.06347), algorithm 1, on token sequences as in Ziegler et al. 2019."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from drivetrain import LossTerm, PolicyGradient
from drivetrain.metrics import Mean, Metric, merge_metrics
from drivetrain.numerics import masked_sum, masked_var
from drivetrain_algo_ppo.config import PPOConfig
from drivetrain_algo_ppo.kl_control import KLController

if TYPE_CHECKING:
    from drivetrain import DataProto, Roles


class PPO(PolicyGradient):
    """Proximal policy optimization.

    Draw answers from the policy and score them; the reward of a token is its score less ``kl_coef`` times its KL
    divergence from the reference. With the critic's values V let A be the whitened generalized advantage estimates and
    R = A + V the returns, before whitening. Over some epochs of mini-batches fit V to R, and maximise the clipped
    objective of A.
    """

    config: PPOConfig

    def __init__(self, config: PPOConfig) -> None:
        super().__init__(config)
        adaptive = config.kl_controller == "adaptive"
        self.kl_ctrl = KLController(config.kl_coef, config.target_kl if adaptive else None, config.kl_horizon)
        self.steps = 0

    def collect(self, roles: Roles, prompts: DataProto) -> DataProto:
        batch = self.log_probs(roles, self.sample(roles, prompts))
        rewards = batch["token_level_scores"]
        if self.config.kl_coef > 0:
            rewards = rewards - self.kl_ctrl.value * self.kl(batch)
        batch = roles.critic.values(batch.with_columns(token_level_rewards=rewards))
        return self.advantages(batch)

    def learn(self, roles: Roles, batch: DataProto) -> dict[str, Metric]:
        c = self.config
        metrics = [self.batch_metrics(batch)]
        self.steps += 1
        for epoch in range(c.epochs):
            for mini_batch in roles.actor.mini_batches(batch, epoch):
                metrics.append(roles.critic.update(mini_batch, *self.loss_terms("critic")))
                if self.steps > c.critic_warmup_steps:
                    metrics.append(roles.actor.update(mini_batch, *self.loss_terms("actor")))
        if c.kl_coef > 0:
            self.kl_ctrl.update(float(self.kl(batch).sum()) / len(batch), len(batch))
        return merge_metrics(metrics)

    def state_dict(self) -> dict[str, Any]:
        return {"kl_coef": self.kl_ctrl.value, "steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.kl_ctrl.target is not None:  # a fixed one follows the config
            self.kl_ctrl.value = state["kl_coef"]
        self.steps = state["steps"]

    def loss_terms(self, role: str) -> Sequence[LossTerm]:
        c = self.config
        if role == "critic":
            args = {"clip_range": c.clip_value, "aggregation": c.aggregation, "scale": c.scale}
            return (LossTerm("value_clip", args=args),)
        return [term for term in super().loss_terms(role) if term.name != "kl"]  # it is charged to the reward

    def batch_metrics(self, batch: DataProto) -> dict[str, Metric]:
        mask = batch["response_mask"]
        tokens = mask.sum()
        unexplained = masked_var(batch["returns"] - batch["values"], mask) / masked_var(batch["returns"], mask)
        metrics = super().batch_metrics(batch) | {
            "value": Mean(masked_sum(batch["values"], mask), tokens),
            "return": Mean(masked_sum(batch["returns"], mask), tokens),
            "explained_variance": Mean(1 - unexplained.nan_to_num(1.0, posinf=1.0), 1),
        }
        if self.config.kl_coef > 0:
            metrics["kl"] = Mean(self.kl(batch).sum(), tokens)
            metrics["kl_coef"] = Mean(self.kl_ctrl.value, 1)
        return metrics
