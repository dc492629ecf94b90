"""SPIN: Chen et al. 2024 (arXiv 2401.01335), algorithm 1."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from drivetrain.metrics import Mean, Metric, merge_metrics
from drivetrain_algo_dpo.algorithm import PairAlgorithm
from drivetrain_algo_dpo.pairs import join_pairs
from drivetrain_algo_spin.config import SPINConfig

if TYPE_CHECKING:
    from drivetrain import DataProto, Roles


class SPIN(PairAlgorithm):
    """Self-play fine-tuning; a step of the run is an iteration t.

    The opponent is the policy as the iteration finds it. It draws a response y' to each prompt x, whose response in the
    data is y. The policy then learns to tell the two apart: it minimises the mean of
    ``-log sigmoid(beta log p(y|x) / p_t(y|x) - beta log p(y'|x) / p_t(y'|x))``, and is the next opponent.
    """

    config: SPINConfig

    def collect(self, roles: Roles, prompts: DataProto) -> DataProto:
        pairs = join_pairs(roles.text.respond(prompts), roles.rollout.generate(prompts))
        return roles.actor.log_probs(pairs).rename({"old_log_probs": "ref_log_probs"})

    def learn(self, roles: Roles, batch: DataProto) -> dict[str, Metric]:
        same = {"same_response": Mean(_same(batch).sum(), len(batch) // 2)}
        return merge_metrics([same, super().learn(roles, batch)])


def _same(pairs: DataProto) -> torch.Tensor:
    """Whether the opponent drew the very tokens of the data, (pairs,); such a pair has no gradient."""
    tokens = torch.where(pairs["response_mask"] != 0, pairs["responses"], -1)
    return (tokens[0::2] == tokens[1::2]).all(dim=1)
