"""SPPO: Wu et al. 2024 (arXiv 2405.00675), algorithm 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from drivetrain import Algorithm, LossTerm, UserError
from drivetrain.metrics import Mean, Metric, merge_metrics
from drivetrain.numerics import group_index, masked_sum
from drivetrain_algo_sppo.config import SPPOConfig
from drivetrain_algo_sppo.preference import best_and_worst, win_rates

if TYPE_CHECKING:
    from drivetrain import DataProto, Roles


class SPPO(Algorithm):
    """Self-play preference optimization. A step is an iteration t of the game.

    For each prompt x draw y_1..y_K from the policy pi_t and estimate ``P_i = P(y_i > pi_t)``, by the mean of its win
    probabilities over the K. Take the best and the worst of them, and fit the policy to
    ``log pi(y_i|x) / pi_t(y_i|x) = eta (P_i - 1/2)`` by least squares. The result is pi_(t+1), the next opponent.
    """

    config: SPPOConfig

    def collect(self, roles: Roles, prompts: DataProto) -> DataProto:
        c = self.config
        batch = roles.rollout.generate(prompts, samples=c.group_size)
        batch = roles.rewards.score(batch)
        if c.preference == "win_rate":
            _check_win_rates(batch)
        batch = roles.actor.log_probs(batch)  # those of the opponent, which the policy is before it learns
        counted = (batch["response_mask"] != 0).any(dim=1)
        rates = win_rates(batch["scores"], group_index(batch["uid"]), counted,
                          preference=c.preference, temperature=c.preference_temperature)  # fmt: skip
        return batch.with_columns(win_rate=rates)

    def learn(self, roles: Roles, batch: DataProto) -> dict[str, Metric]:
        mask = batch["response_mask"]
        metrics: list[dict[str, Metric]] = [{"entropy": Mean(masked_sum(batch["entropy"], mask), mask.sum())}]
        if self.config.train == "best_worst":
            batch = self._best_and_worst(batch)
        for epoch in range(self.config.epochs):
            for mini_batch in roles.actor.mini_batches(batch, epoch):
                metrics.append(roles.actor.update(mini_batch, *self.loss_terms("actor")))
        return merge_metrics(metrics)

    def loss_terms(self, role: str) -> Sequence[LossTerm]:
        return (LossTerm("sppo", args={"eta": self.config.eta}),)

    def _best_and_worst(self, batch: DataProto) -> DataProto:
        """The rows of the best and the worst sample of each prompt, with their labels."""
        scores, rates = batch["scores"], batch["win_rate"].clone()
        counted = (batch["response_mask"] != 0).any(dim=1)
        best, worst = best_and_worst(scores, group_index(batch["uid"]), counted)
        if self.config.labels == "hard":
            differ = scores[best] > scores[worst]
            rates[best[differ]], rates[worst[differ]] = 1.0, 0.0
        learnt: DataProto = batch.with_columns(win_rate=rates)[torch.cat([best, worst]).unique()]
        return learnt


def _check_win_rates(batch: DataProto) -> None:
    """Raises UserError if a score is no probability."""
    wrong = batch["scores"][(batch["scores"] < 0) | (batch["scores"] > 1)]
    if len(wrong):
        labels = [name.removeprefix("reward/") for name in batch.keys() if name.startswith("reward/")]
        said = f"reward {labels[0]!r}" if len(labels) == 1 else f"the weighted sum of rewards {', '.join(labels)}"
        raise UserError(f"{said} gave {float(wrong[0]):g}, which is no win probability", where="algorithm.preference",
                        mend="take rewards between 0 and 1, or set it to bradley_terry or order")  # fmt: skip
