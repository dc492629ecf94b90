"""The reward ``llm_judge``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from drivetrain import RewardSample, SampleError, Score
from drivetrain_judges.endpoint import Endpoint
from drivetrain_judges.texts import NoAnswer, fill

if TYPE_CHECKING:
    from drivetrain_judges.configs import LLMJudgeConfig


class LLMJudge:
    """The number x in [minimum, maximum] that a model gives each sample, mapped linearly to ``scale`` = (low, high)::

        score = low + (high - low) (x - minimum) / (maximum - minimum)

    A number outside of the range is no verdict.
    """

    def __init__(self, config: LLMJudgeConfig) -> None:
        """Raises UserError when the API key is not in the environment."""
        self._config, self._endpoint = config, Endpoint(config, self._number)

    def __call__(self, samples: Sequence[RewardSample]) -> list[Score]:
        """One score a sample, in order. Raises SampleError by JudgeError; nothing that fails is given a score."""
        bounds = {"minimum": f"{self._config.minimum:g}", "maximum": f"{self._config.maximum:g}"}
        texts = []
        for index, sample in enumerate(samples):
            try:
                texts.append(fill(self._config.template, sample, response=sample.response, **bounds))
            except NoAnswer as error:
                raise SampleError(index) from error
        return [self._score(number) for number in self._endpoint.ask(texts, range(len(texts)))]

    def _number(self, verdict: str) -> float | None:
        try:
            number = float(verdict)
        except ValueError:
            return None
        return number if self._config.minimum <= number <= self._config.maximum else None

    def _score(self, number: float) -> Score:
        config = self._config
        correct = None if config.correct_above is None else number > config.correct_above
        if config.scale is None:
            return Score(number, correct=correct)
        low, high = config.scale
        return Score(
            low + (high - low) * (number - config.minimum) / (config.maximum - config.minimum), correct=correct
        )
