"""Scores from the verdicts that a reward model generates. One that cannot be read stops the run."""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from drivetrain.builtin.per_sample import SampleError
from drivetrain.contracts.data import RewardSample, Score
from drivetrain.contracts.placement import WorkerGroup
from drivetrain.protocol import DataProto

if TYPE_CHECKING:
    from drivetrain.config import JudgeConfig, RewardModelConfig

_shorten = reprlib.Repr()
_shorten.maxstring = 200


class GenerativeReward:
    """The number in the verdict of a language model, by the workers that play it."""

    def __init__(self, group: WorkerGroup, section: RewardModelConfig) -> None:
        assert section.judge is not None and section.rollout is not None
        self._group, self._judge = group, section.judge
        self._attempts = 1 + (section.judge.verdict_retries if section.rollout.temperature > 0 else 0)

    def __call__(self, samples: Sequence[RewardSample]) -> list[Score]:
        """One score a sample, in order; samples that read alike are judged once.

        Raises:
            SampleError: no verdict on that sample could be read, or the question has {answer} and the sample has none.
        """
        questions = [_question(self._judge.prompt, sample, index) for index, sample in enumerate(samples)]
        found: dict[str, float] = {}
        verdicts: dict[str, str] = dict.fromkeys(questions, "")
        for attempt in range(self._attempts):
            if asked := [q for q in verdicts if q not in found]:
                batch = DataProto.from_dict({}, {"question": asked}, {"attempt": attempt})
                verdicts |= zip(asked, self._group.call("generate_verdicts", batch)["verdict"].tolist(), strict=True)
                found |= {q: n for q in asked if (n := number_in(verdicts[q], self._judge)) is not None}
        if unread := [index for index, q in enumerate(questions) if q not in found]:
            last, times = _shorten.repr(verdicts[questions[unread[0]]]), self._attempts
            tried = f", the last of {times} that were drawn" if times > 1 else ""
            raise SampleError(unread[0]) from ValueError(f"no number could be read from the verdict {last}{tried}")
        bound = self._judge.correct_above
        return [Score(found[q], correct=None if bound is None else found[q] > bound) for q in questions]


def number_in(verdict: str, judge: JudgeConfig) -> float | None:
    """The number that a verdict says; None if it says none, or one that is not finite or out of bounds."""
    matches = list(re.finditer(judge.pattern, verdict))
    try:
        number = float(matches[-1][1 if matches[-1].re.groups else 0])
    except (IndexError, TypeError, ValueError):  # no match, a group that took no part, or no number
        return None
    inside = (judge.min is None or number >= judge.min) and (judge.max is None or number <= judge.max)
    return number if inside and math.isfinite(number) else None


def _question(template: str, sample: RewardSample, index: int) -> str:
    """The judge's prompt about one sample. Braces in what is filled in mean nothing."""
    if "{answer}" in template and sample.answer is None:
        raise SampleError(index) from ValueError("the judge's prompt has {answer}, and the sample has no answer")
    prompt = sample.prompt if sample.messages is None else "\n\n".join(m["content"] for m in sample.messages)
    values = {"{prompt}": prompt, "{response}": sample.response, "{answer}": sample.answer or ""}
    return re.sub("|".join(map(re.escape, values)), lambda match: values[match[0]], template)
