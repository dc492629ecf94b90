"""Signs that a run goes wrong: each is said when it appears, with what else the numbers show and what helps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from drivetrain.config import HealthConfig

STEPS = 5  # whose means are compared: the first of the run with the latest
WATCHED = ("reward", "accuracy", "entropy", "kl", "approx_kl", "response_tokens", "truncated", "groups_without_signal",
           "rollout_mismatch", "rollout_mismatch_max", "rollout_ppl_ratio", "rollout_ess")  # fmt: skip


class Health:
    """Watches ``train/...`` metrics, of a rollout that ``cuts`` its distribution or not. A sign is said again only
    after it had gone."""

    def __init__(self, limits: HealthConfig, cuts: bool = False) -> None:
        self._limits, self._cuts = limits, cuts
        self._first: dict[str, list[float]] = {}
        self._latest: dict[str, list[float]] = {}
        self._present: list[str] = []

    def watch(self, metrics: Mapping[str, float]) -> list[str]:
        """Take in the metrics of a step; returns the signs that have appeared."""
        for name in WATCHED:
            if (value := metrics.get(f"train/{name}")) is not None:
                first = self._first.setdefault(name, [])
                first += [value] * (len(first) < STEPS)
                self._latest[name] = [*self._latest.get(name, []), value][-STEPS:]
        found = {
            "entropy collapse": self._entropy(), "KL blow-up": self._divergence(), "length explosion": self._length(),
            "dead prompts": self._prompts(), "rollout mismatch": self._mismatch(),
        }  # fmt: skip
        appeared = [f"{sign}: {text}" for sign, text in found.items() if text and sign not in self._present]
        self._present = [sign for sign, text in found.items() if text]
        return appeared

    def _entropy(self) -> str:
        limit, first, now = self._limits.entropy_below, self._begun("entropy"), self._now("entropy")
        if limit is None or not now < limit * first:
            return ""
        return (
            f"{now:.3g} nats a token after {first:.3g} in the first steps, while the reward went {self._reward()}; "
            "the samples of a prompt are nearly alike, so there is little left to learn from: add an entropy bonus, "
            "raise rollout.temperature or the upper clip bound, or lower the learning rate"
        )

    def _divergence(self) -> str:
        limit = self._limits.kl_above
        for name, what in (("kl", "from the reference policy"), ("approx_kl", "within one step's updates")):
            if limit is not None and self._now(name) > limit:
                return (
                    f"the policy has moved {self._now(name):.3g} nats a token {what} ({self._begun(name):.3g} in the "
                    f"first steps), while the reward went {self._reward()}: lower the learning rate or the number "
                    "of updates a batch, or charge more for the divergence"
                )
        return ""

    def _length(self) -> str:
        limit, first, now = self._limits.length_above, self._begun("response_tokens"), self._now("response_tokens")
        cut = self._now("truncated")
        if limit is None or not (now > limit * first and cut > 0.5):
            return ""
        return (
            f"responses have {now:.4g} tokens after {first:.4g} in the first steps, and {cut:.0%} of them are cut off "
            "at rollout.max_response_tokens, so their answers are lost: raise it, or reward shorter answers"
        )

    def _prompts(self) -> str:
        limit, dead = self._limits.dead_prompts_above, self._now("groups_without_signal")
        if limit is None or not dead > limit:
            return ""
        accuracy = self._now("accuracy")
        why = "easy" if accuracy > 0.5 else "hard, or the reward never recognises an answer"
        cause = f"{accuracy:.0%} of the answers are right, so the prompts are too {why}"
        if math.isnan(accuracy):
            cause = "nothing tells why: no reward judges right and wrong"
        return (
            f"all samples of a prompt score alike for {dead:.0%} of the completions, which teach nothing; {cause}: "
            "choose other prompts, or draw more samples of each"
        )

    def _mismatch(self) -> str:
        """Said at once, of the mean of the steps there are: this is wrong from the first step on, or not at all."""
        said = {name: self._latest.get(name, [math.nan]) for name in WATCHED if name.startswith("rollout_")}
        now, ppl, ess = (fmean(said[f"rollout_{name}"]) for name in ("mismatch", "ppl_ratio", "ess"))
        limit, first = self._limits.mismatch_above or math.inf, self._begun("rollout_mismatch")
        few = ess < (self._limits.ess_below or 0)
        if not (now > limit or few):
            return ""
        found = (
            f"the trainer's log-probs are {now:.3g} nats a token from those that the rollout drew with, "
            f"{max(said['rollout_mismatch_max']):.3g} at most, and the tokens are worth {ess:.0%} of as many draws of "
            "its policy: "
        )
        if self._cuts and not few and now < limit + math.log(max(ppl, 1)):  # equal if the rollout finds each likelier
            return found + (
                "all but little of it is one-sided, as top_k, top_p or min_p make it, for the rollout's log-probs are "
                "of the distribution that they cut down; do without them, or raise mismatch_above"
            )
        if now > 2 * first:
            return found + (
                f"after {first:.3g} in the first steps, so weights may reach the rollout late or not at all, or "
                "training has come to where dtypes or kernels of the engines differ most"
            )
        return found + (
            "the engines compute in other dtypes or with other kernels, weights do not reach the rollout, or its "
            "log-probs are of another temperature or of what top_k, top_p, min_p or min_response_tokens left; until "
            "that is mended, rollout_is and rollout_band keep such tokens from misleading the loss"
        )

    def _reward(self) -> str:
        return f"from {self._begun('reward'):.3g} to {self._now('reward'):.3g}"

    def _begun(self, name: str) -> float:
        values = self._first.get(name, [])
        return fmean(values) if len(values) == STEPS else math.nan

    def _now(self, name: str) -> float:
        """NaN, which no limit is compared to with success, until there are as many steps as are averaged."""
        values = self._latest.get(name, [])
        return fmean(values) if len(values) == STEPS else math.nan

    def state_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {"first": self._first, "latest": self._latest, "present": self._present}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what :meth:`state_dict` returned."""
        self._first, self._latest, self._present = state["first"], state["latest"], state["present"]
