"""The reward ``gsm8k``."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import TYPE_CHECKING

from drivetrain import PerSample, RewardSample

if TYPE_CHECKING:
    from drivetrain_tasks.configs import GSM8KRewardConfig

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
# A minus after a word or a number joins or subtracts; it is no sign.
_NUMBER = re.compile(rf"((?:(?<![\w.)])[-\u2212])?)\$?((?:(?<=\$)[-\u2212])?)({_DIGITS})")
_FINAL = re.compile(rf"####\s*{_NUMBER.pattern}")


def last_number(text: str, *, marked: bool) -> Decimal | None:
    """The last number of the text, or with ``marked`` the number after the last ``####``.

    Thousands commas and a dollar sign are left out: ``-$1,234.50`` is -1234.5.
    """
    if marked:
        start = text.rfind("####")
        match = _FINAL.match(text, start) if start >= 0 else None
    else:
        match = next(reversed(list(_NUMBER.finditer(text))), None)
    if match is None:
        return None
    sign, inner_sign, digits = match.groups()
    value = Decimal(digits.replace(",", ""))
    return -value if sign or inner_sign else value


class GSM8KReward(PerSample):
    """1 for a response whose final number equals the answer's, else 0.

    The answer is a solution that ends with ``#### 42``, or just the number; anything else is an error.
    """

    def __init__(self, config: GSM8KRewardConfig) -> None:
        self._config = config

    def judge(self, sample: RewardSample) -> bool:
        answer = sample.answer or ""
        wanted = last_number(answer if "####" in answer else f"#### {answer}", marked=True)
        if wanted is None:
            raise ValueError(f"the answer {sample.answer!r:.200} has no final number '#### 42'")
        if self._config.require_stop and sample.finish_reason != "stop":
            return False
        return last_number(sample.response, marked=self._config.mode == "strict") == wanted
