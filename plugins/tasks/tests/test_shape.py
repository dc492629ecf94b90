from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from drivetrain_tasks.configs import FormatRewardConfig, LengthRewardConfig
from drivetrain_tasks.shape import FormatReward, LengthReward


@pytest.mark.parametrize(
    ("match", "response", "value"),
    [
        ("whole", "<think>a\nb</think>c", 1.0),
        ("whole", "so <think>a</think>c", 0.0),
        ("any", "so <think>a</think>c", 1.0),
        ("any", "so c", 0.0),
    ],
)
def test_format(sample: Any, match: Any, response: str, value: float) -> None:
    config = FormatRewardConfig(name="format", pattern="<think>.+</think>.+", match=match)
    assert FormatReward(config)([sample(response)]) == [value]


def test_length(sample: Any) -> None:
    config = LengthRewardConfig(name="length", soft_limit_tokens=10, hard_limit_tokens=14)
    lengths = (0, 10, 11, 13, 14, 99)
    assert LengthReward(config)([sample("", tokens=n) for n in lengths]) == [0, 0, -0.25, -0.75, -1, -1]


def test_bad_settings() -> None:
    with pytest.raises(ValidationError, match="no regular expression"):
        FormatRewardConfig(name="format", pattern="(")
    with pytest.raises(ValidationError, match="must be less than"):
        LengthRewardConfig(name="length", soft_limit_tokens=4, hard_limit_tokens=4)
