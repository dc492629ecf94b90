"""The rewards ``format`` and ``length``, which look at the shape of a response and not at its answer."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from drivetrain import PerSample, RewardSample

if TYPE_CHECKING:
    from drivetrain_tasks.configs import FormatRewardConfig, LengthRewardConfig


class FormatReward(PerSample):
    """1 for a response that the pattern matches, else 0. It does not judge correctness."""

    def __init__(self, config: FormatRewardConfig) -> None:
        pattern = re.compile(config.pattern, re.DOTALL)
        self._match = pattern.fullmatch if config.match == "whole" else pattern.search

    def judge(self, sample: RewardSample) -> float:
        return 1.0 if self._match(sample.response) else 0.0


class LengthReward(PerSample):
    """A penalty in [-1, 0] on the number n of response tokens, the end-of-sequence token counted.

    With soft limit S and hard limit H, in tokens::

        reward = -min(1, max(0, n - S) / (H - S))

    This is the soft overlong punishment of DAPO (arXiv:2503.14476, equation 13), with H its longest response and
    H - S its cache. It does not judge correctness.
    """

    def __init__(self, config: LengthRewardConfig) -> None:
        self._soft, self._hard = config.soft_limit_tokens, config.hard_limit_tokens

    def judge(self, sample: RewardSample) -> float:
        excess = max(0, len(sample.response_token_ids) - self._soft)
        return -min(1.0, excess / (self._hard - self._soft))
