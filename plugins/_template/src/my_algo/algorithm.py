"""The algorithm: two short programs that the driver calls once a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain import Algorithm, LossTerm
from drivetrain.metrics import Metric, merge_metrics
from drivetrain.numerics import group_index, group_mean_std
from my_algo.config import MyAlgoConfig

if TYPE_CHECKING:
    from drivetrain import DataProto, Roles


class MyAlgo(Algorithm):
    """REINFORCE with the mean reward of a prompt's samples as baseline."""

    config: MyAlgoConfig

    def collect(self, roles: Roles, prompts: DataProto) -> DataProto:
        """Sample, score, and say how much better each answer is than its group."""
        batch = roles.rollout.generate(prompts, samples=self.config.group_size)
        batch = roles.rewards.score(batch)
        baseline, _, _ = group_mean_std(batch["scores"], group_index(batch.non_tensor_batch["uid"]))
        advantages = (batch["scores"] - baseline)[:, None] * batch["response_mask"]
        return batch.with_columns(advantages=advantages)

    def learn(self, roles: Roles, batch: DataProto) -> dict[str, Metric]:
        """One update a mini-batch."""
        return merge_metrics(
            [roles.actor.update(mini_batch, LossTerm("my-algo")) for mini_batch in roles.actor.mini_batches(batch)]
        )
