"""DAPO: Yu et al. 2025 (arXiv 2503.14476), algorithm 1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from drivetrain import DataProto, PolicyGradient, UserError
from drivetrain.metrics import Mean, Metric
from drivetrain.numerics import group_mean_std
from drivetrain_algo_dapo.config import DAPOConfig

if TYPE_CHECKING:
    from drivetrain import Roles


class DAPO(PolicyGradient):
    """Decoupled clip and dynamic sampling policy optimization.

    Draw G answers to each prompt and score them; keep the prompts whose answers are neither all right nor all wrong,
    and draw further ones until there are enough (equation 11). The reward is the score less a price of length (equation
    13), the advantage that of GRPO. Maximise the clipped objective with the higher upper clip, averaged over tokens.
    """

    config: DAPOConfig

    def __init__(self, config: DAPOConfig) -> None:
        super().__init__(config)
        self.surplus: DataProto | None = None  # kept groups that no step has needed yet, with their log-probs
        self.sampling: dict[str, Metric] = {}

    def collect(self, roles: Roles, prompts: DataProto) -> DataProto:
        c, wanted = self.config, len(prompts)
        old = [] if self.surplus is None else [self.surplus]
        rounds = [self.sample(roles, prompts)]
        kept = [self.telling(rounds[0])]
        while (found := sum(map(_groups, old + kept))) < wanted and len(rounds) < c.max_rounds:
            rounds.append(self.sample(roles, roles.prompts.draw(c.round_prompts or wanted)))
            kept.append(self.telling(rounds[-1]))
        drawn, new = sum(map(_groups, rounds)), sum(map(_groups, kept))
        if found < wanted:
            told = f"{new} of {drawn} prompts drawn in {len(rounds)} rounds ({new / drawn:.0%})"
            wanted = self._fewer(found, wanted, roles.actor.mini_batch_prompts or 1, told)
        if new:  # ratios start from the policy that drew a group: its log-probs are taken before it learns
            batch = self.log_probs(roles, _joined([part for part in kept if len(part)]))
            old.append(batch.with_columns(surplus_age=torch.zeros(len(batch), dtype=torch.long)))
        pool = _joined(old)
        uids = pool["uid"].tolist()
        first = set(list(dict.fromkeys(uids))[:wanted])
        taken = torch.tensor([uid in first for uid in uids])
        batch, left = pool[taken], pool[~taken]
        self.surplus = left.with_columns(surplus_age=left["surplus_age"] + 1) if len(left) else None
        penalty = self.length_penalty(batch["response_mask"])
        scores = [float(part["scores"].double().sum()) for part in rounds]
        self.sampling = {
            "rounds": Mean(len(rounds), 1),
            "drawn_reward": Mean(sum(scores), sum(map(len, rounds))),
            "filtered_groups": Mean(drawn - new, drawn),
            "surplus_groups": Mean(found - wanted, 1),
            "surplus_age": Mean(batch["surplus_age"].sum(), len(batch)),
            "length_penalty": Mean(penalty.sum(), len(batch)),
        }
        return self.advantages(batch.with_columns(token_level_rewards=batch["token_level_scores"] - penalty))

    def learn(self, roles: Roles, batch: DataProto) -> dict[str, Metric]:
        if self.config.mask_truncated:
            cut = torch.tensor([reason == "length" for reason in batch["finish_reason"]])
            batch = batch.with_columns(response_mask=batch["response_mask"].masked_fill(cut[:, None], 0))
        return super().learn(roles, batch) | self.sampling

    def telling(self, batch: DataProto) -> DataProto:
        """The groups that have something to tell: whose responses are both right and wrong, or differ in score."""
        answered = batch[(batch["response_mask"] != 0).any(dim=1)]
        values = answered["correct" if self.config.filter_by == "accuracy" else "scores"]
        if bool(values.isnan().any()):
            raise UserError("no reward says of every response whether it is right", where="algorithm.filter_by",
                            mend="take a reward that does, such as exact_match, or set filter_by to score")  # fmt: skip
        spread = group_mean_std(values, answered["uid"].tolist())[1]
        return batch.select_uids(answered["uid"][(spread > 0).numpy()].tolist())

    def length_penalty(self, mask: Tensor) -> Tensor:
        """Minus equation 13, weighed, at the last token of each response (rows, response).

        With L the width of the mask, which is ``rollout.max_response_tokens``, C the cache and n the tokens of a
        response, it is ``overlong_penalty * clip((n - (L - C)) / C, 0, 1)``.
        """
        drawn, longest = mask != 0, mask.shape[1]
        length = drawn.sum(dim=1, keepdim=True)
        cache = self.config.overlong_cache_tokens or -(-longest // 5)
        penalty = self.config.overlong_penalty * ((length - (longest - cache)) / cache).clamp(0, 1)
        return penalty * (drawn & (drawn.cumsum(dim=1) == length))

    def _fewer(self, found: int, wanted: int, multiple: int, told: str) -> int:
        """How many prompts fill whole mini-batches of ``multiple``, if fewer are allowed and there are so many."""
        fewer = found // multiple * multiple if self.config.too_few == "fewer" else 0
        if fewer:
            return fewer
        by = "both right and wrong" if self.config.filter_by == "accuracy" else "of different scores"
        raise UserError(
            f"only {told} have responses {by}; with those kept before there are {found}, and the step needs "
            f"{wanted if self.config.too_few == 'error' else multiple}", where="algorithm.max_rounds",
            mend="raise algorithm.max_rounds or group_size, take prompts that the model answers right now and then, or "
            "set too_few to fewer, which learns from as many whole mini-batches as there are",
        )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        return {} if self.surplus is None else {"surplus": self.surplus}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.surplus = state.get("surplus")


def _groups(batch: DataProto) -> int:
    return len(set(batch["uid"].tolist()))


def _joined(parts: Sequence[DataProto]) -> DataProto:
    """The rows of all parts, their prompts left padded to the longest of all."""
    width = max(part["prompts"].shape[1] for part in parts)
    wide = [
        part.with_columns(**{name: pad(part[name], (width - part["prompts"].shape[1], 0))
                             for name in ("prompts", "input_ids", "attention_mask")})
        for part in parts
    ]  # fmt: skip
    try:
        return DataProto.concat(wide)
    except ValueError as error:
        raise UserError(f"the groups kept in the checkpoint do not fit the settings: {error}", where="algorithm",
                        mend="resume with the settings that they were drawn under") from error  # fmt: skip
