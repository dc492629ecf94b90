"""The reward ``exact_match``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain.builtin.per_sample import PerSample

if TYPE_CHECKING:
    from drivetrain.builtin.configs import ExactMatchConfig
    from drivetrain.contracts.data import RewardSample


class ExactMatch(PerSample):
    """1 for a response that equals the sample's answer, else 0; a sample without an answer is an error."""

    def __init__(self, config: ExactMatchConfig) -> None:
        self.config = config

    def judge(self, sample: RewardSample) -> bool:
        if sample.answer is None:
            raise ValueError("the sample has no answer to compare with")
        finished = sample.finish_reason == "stop" or not self.config.require_stop
        return finished and self._form(sample.response) == self._form(sample.answer)

    def _form(self, text: str) -> str:
        text = text.strip() if self.config.strip else text
        return text.casefold() if self.config.ignore_case else text
