"""Signs that a run goes wrong: each is said when it appears, with what else the numbers show and what helps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from drivetrain.config import HealthConfig

STEPS = 5  # whose means are compared: the first of the run with the latest
WATCHED = ("reward", "accuracy", "entropy", "kl", "approx_kl", "response_tokens", "truncated", "groups_without_signal")


class Health:
    """Watches ``train/...`` metrics. A sign is said again only after it had gone."""

    def __init__(self, limits: HealthConfig) -> None:
        self._limits = limits
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
            "dead prompts": self._prompts(),
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
