from __future__ import annotations

import logging
import threading
import time
from typing import Any

import pytest

from drivetrain_tasks.configs import MathVerifyRewardConfig
from drivetrain_tasks.math_answers import MathVerifyReward


@pytest.fixture(scope="module")
def reward() -> MathVerifyReward:
    return MathVerifyReward(MathVerifyRewardConfig(name="math_verify", sample_timeout_s=2))


@pytest.mark.parametrize(
    ("answer", "response", "right"),
    [
        ("\\frac{1}{2}", "so it is $0.5$.", True),
        ("\\frac{1}{2}", "\\boxed{\\frac{2}{4}}", True),
        ("1,234", "The answer is 1234", True),
        ("x+1", "$1 + x$", True),
        ("$x+1$", "$x + 2$", False),
        ("The total is $7$ apples", "7", True),
        ("(1,2)", "$(1,2)$", True),
        ("42", "garbage {{{ \\frac", False),
        ("42", "", False),
    ],
)
def test_equal_expressions(reward: MathVerifyReward, sample: Any, answer: str, response: str, right: bool) -> None:
    assert reward([sample(response, answer)]) == [right]


@pytest.mark.parametrize("answer", [None, "", "$$", "$\\frac{$"])
def test_a_reference_that_is_no_expression_is_an_error(reward: MathVerifyReward, sample: Any, answer: Any) -> None:
    with pytest.raises(ValueError, match="answer"):
        reward.judge(sample("42", answer))


def test_a_cut_response_is_wrong(reward: MathVerifyReward, sample: Any) -> None:
    assert reward([sample("42", "42", finish_reason="length")]) == [False]
    lenient = MathVerifyReward(MathVerifyRewardConfig(name="math_verify", require_stop=False))
    assert lenient([sample("42", "42", finish_reason="length")]) == [True]


def test_it_works_off_the_main_thread(reward: MathVerifyReward, sample: Any) -> None:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(reward([sample("42", "42"), sample("41", "42")])))
    thread.start()
    thread.join(20)
    assert found == [True, False]


def test_a_response_that_never_ends_evaluating_is_wrong(
    reward: MathVerifyReward, sample: Any, caplog: pytest.LogCaptureFixture
) -> None:
    reward.judge(sample("1", "1"))
    start = time.monotonic()
    with caplog.at_level(logging.WARNING):
        scores = reward([sample("$9^{9^{9^9}}$", "42"), sample("42", "42")])
    assert scores == [False, True]
    assert time.monotonic() - start < 15
    assert "no reply within 2 s" in caplog.text
