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
            if not (asked := [question for question in verdicts if question not in found]):
                break
            batch = DataProto.from_dict({}, {"question": asked}, {"attempt": attempt})
            verdicts |= zip(asked, self._group.call("generate_verdicts", batch)["verdict"].tolist(), strict=True)
            numbers = {question: number_in(verdicts[question], self._judge) for question in asked}
            found |= {question: number for question, number in numbers.items() if number is not None}
        for index, question in enumerate(questions):
            if question not in found:
                tried = f" {self._attempts} times" if self._attempts > 1 else ""
                raise SampleError(index) from ValueError(
                    f"no number could be read{tried} from the verdict {_shorten.repr(verdicts[question])}"
                )
        bound = self._judge.correct_above
        return [Score(found[q], correct=None if bound is None else found[q] > bound) for q in questions]


def number_in(verdict: str, judge: JudgeConfig) -> float | None:
    """The number that a verdict says; None if it says none, or one that is not finite or out of bounds."""
    matches = list(re.finditer(judge.pattern, verdict))
    if not matches:
        return None
    try:
        number = float(matches[-1][1 if matches[-1].re.groups else 0] or "")
    except ValueError:
        return None
    low, high = (-math.inf if judge.min is None else judge.min), (math.inf if judge.max is None else judge.max)
    return number if math.isfinite(number) and low <= number <= high else None


def _question(template: str, sample: RewardSample, index: int) -> str:
    """The judge's prompt about one sample. Braces in what is filled in mean nothing."""
    if "{answer}" in template and sample.answer is None:
        raise SampleError(index) from ValueError("the judge's prompt has {answer}, and the sample has no answer")
    prompt = sample.prompt if sample.messages is None else "\n\n".join(m["content"] for m in sample.messages)
    values = {"{prompt}": prompt, "{response}": sample.response, "{answer}": sample.answer or ""}
    return re.sub("|".join(map(re.escape, values)), lambda match: values[match[0]], template)
