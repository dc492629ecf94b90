"""DPO: Rafailov et al. 2023 (arXiv 2305.18290); online: Guo et al. 2024 (arXiv 2402.04792)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from drivetrain import Algorithm, LossTerm
from drivetrain.metrics import Metric, merge_metrics
from drivetrain_algo_dpo.config import DPOConfig, OnlineDPOConfig, PairConfig
from drivetrain_algo_dpo.pairs import as_pairs, best_and_worst, scored_pairs

if TYPE_CHECKING:
    from drivetrain import DataProto, Roles


class PairAlgorithm(Algorithm):
    """Learns from a batch of pairs that has ``ref_log_probs``."""

    config: PairConfig

    def learn(self, roles: Roles, batch: DataProto) -> dict[str, Metric]:
        return merge_metrics(
            [
                roles.actor.update(mini_batch, *self.loss_terms("actor"))
                for epoch in range(self.config.epochs)
                for mini_batch in roles.actor.mini_batches(batch, epoch)
            ]
        )

    def loss_terms(self, role: str) -> Sequence[LossTerm]:
        return (LossTerm("dpo", args=self.config.loss_options()),)


class DPO(PairAlgorithm):
    """Direct preference optimization: make the better response of each pair more likely, against the reference."""

    config: DPOConfig

    def collect(self, roles: Roles, prompts: DataProto) -> DataProto:
        return roles.ref.log_probs(as_pairs(roles.text.respond(prompts, "response_text", "rejected_text")))


class OnlineDPO(PairAlgorithm):
    """Online DPO: of ``group_size`` samples of each prompt, the best and the worst by the rewards form the pair."""

    config: OnlineDPOConfig

    def collect(self, roles: Roles, prompts: DataProto) -> DataProto:
        samples = self.config.group_size
        batch = roles.rewards.score(roles.rollout.generate(prompts, samples=samples))
        pairs = scored_pairs(batch, samples)
        if self.config.reference == "start":
            reference = roles.ref.log_probs(pairs)["ref_log_probs"]
        else:
            reference = roles.actor.log_probs(pairs)["old_log_probs"]
        nothing = torch.zeros_like(reference[:1]).expand(len(batch), -1)  # of the samples between best and worst
        return batch.with_columns(ref_log_probs=nothing.index_copy(0, best_and_worst(batch, samples), reference))

    def learn(self, roles: Roles, batch: DataProto) -> dict[str, Metric]:
        return super().learn(roles, scored_pairs(batch, self.config.group_size))
