from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from drivetrain.builtin.configs import JsonlConfig
from drivetrain.builtin.jsonl import JsonlDataset
from drivetrain_tasks.configs import GSM8KRewardConfig
from drivetrain_tasks.gsm8k import GSM8KReward, last_number


def reward(**options: Any) -> GSM8KReward:
    return GSM8KReward(GSM8KRewardConfig(name="gsm8k", **options))


@pytest.fixture(scope="module")
def problems(gsm8k_file: Path) -> JsonlDataset:
    config = JsonlConfig(name="jsonl", path=gsm8k_file, prompt_key="question", response_key="answer")
    return JsonlDataset(config)


def test_the_references_are_right_and_off_by_one_is_wrong(problems: JsonlDataset, sample: Any) -> None:
    assert len(problems) == 20
    for problem in problems:
        final = str(problem.response).rsplit("#### ")[-1].replace(",", "")
        for mode in ("strict", "flexible"):
            judge = reward(mode=mode).judge
            assert judge(sample(str(problem.response), problem.answer))
            assert not judge(sample(f"#### {int(final) + 1}", problem.answer))
        assert reward(mode="flexible").judge(sample(f"That makes ${final}.00.", problem.answer))
        assert not reward().judge(sample(f"That makes {final}", problem.answer))


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("5 then 7.", "7"),
        ("$1,234,567.50 in all", "1234567.50"),
        ("it is -5", "-5"),
        ("it is \u22125", "-5"),
        ("-$5", "-5"),
        ("$-5", "-5"),
        ("16-3", "3"),
        ("x=-.5", "-.5"),
        ("1,2345", "2345"),
        ("12,34", "34"),
        ("50%", "50"),
        ("007", "7"),
        ("none", None),
        ("", None),
    ],
)
def test_last_number(text: str, number: str | None) -> None:
    assert last_number(text, marked=False) == (None if number is None else Decimal(number))


@pytest.mark.parametrize(
    ("text", "number"),
    [("3\n#### 1,000", "1000"), ("####-2", "-2"), ("#### $3", "3"), ("#### 1 #### 2\n", "2"), ("#### x 3", None),
     ("3", None)],
)  # fmt: skip
def test_marked_number(text: str, number: str | None) -> None:
    assert last_number(text, marked=True) == (None if number is None else Decimal(number))


def test_answers_and_cut_responses(sample: Any) -> None:
    assert reward().judge(sample("#### 18.0", "18"))
    assert not reward().judge(sample("#### 18", "18", finish_reason="length"))
    assert reward(require_stop=False).judge(sample("#### 18", "18", finish_reason="length"))
    for answer in (None, "", "eighteen", "it is 18"):
        with pytest.raises(ValueError, match="has no final number"):
            reward().judge(sample("#### 18", answer))
