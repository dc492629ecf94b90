"""Supervised fine-tuning on the responses of a dataset."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from drivetrain import Algorithm, LossTerm
from drivetrain.metrics import Metric, merge_metrics
from drivetrain_algo_sft.config import SFTConfig

if TYPE_CHECKING:
    from drivetrain import DataProto, Roles


class SFT(Algorithm):
    """Maximise the likelihood of each prompt's response, its end-of-sequence token included."""

    config: SFTConfig

    def collect(self, roles: Roles, prompts: DataProto) -> DataProto:
        return roles.text.respond(prompts)

    def learn(self, roles: Roles, batch: DataProto) -> dict[str, Metric]:
        return merge_metrics(
            [
                roles.actor.update(mini_batch, *self.loss_terms("actor"))
                for epoch in range(self.config.epochs)
                for mini_batch in roles.actor.mini_batches(batch, epoch)
            ]
        )

    def loss_terms(self, role: str) -> Sequence[LossTerm]:
        return (LossTerm("nll", args={"aggregation": self.config.aggregation}),)
