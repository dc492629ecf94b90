from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from drivetrain import UserError
from drivetrain_tasks.configs import ReasoningGymConfig, ReasoningGymRewardConfig
from drivetrain_tasks.entries import from_json, make_task, to_json
from drivetrain_tasks.gym_dataset import ReasoningGymDataset
from drivetrain_tasks.gym_reward import ReasoningGymReward, verify

SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def sums(**options: Any) -> ReasoningGymDataset:
    given = {"name": "reasoning_gym", "task": "chain_sum", "size": 60, "seed": 7, "task_args": SUMS,
             "prompt_pattern": r":\s*(.+)$", "strip_spaces": True}  # fmt: skip
    return ReasoningGymDataset(ReasoningGymConfig.model_validate(given | options))


def test_items_become_examples() -> None:
    dataset = sums()
    example = dataset[3]
    assert len(dataset) == 60 and dataset[3] == sums()[3]
    left, right = example.prompt.rstrip("=")[0], example.prompt.rstrip("=")[2]  # type: ignore[union-attr]
    assert example.prompt[1] in "+-" and len(example.prompt) == 4
    assert example.answer == example.response == str(eval(f"{left}{example.prompt[1]}{right}"))
    assert example.data_source == "chain_sum"
    assert json.loads(json.dumps(example.extra)) == example.extra


def test_without_a_pattern_the_prompt_is_the_question() -> None:
    example = sums(prompt_pattern=None, strip_spaces=False)[0]
    assert example.prompt == example.extra["question"]
    assert str(example.prompt).startswith("State the final answer")


def test_another_seed_shifts_the_items_and_is_no_held_out_set() -> None:
    first, second = sums(seed=7), sums(seed=8)
    assert [first[i].prompt for i in range(1, 60)] == [second[i].prompt for i in range(59)]


def test_disjoint_from_leaves_out_what_the_other_set_has() -> None:
    held_out = sums(size=40, seed=0)
    everything, train = sums(size=300, seed=20), sums(size=300, seed=20, disjoint_from={"seed": 0, "size": 40})
    theirs = {held_out[i].prompt for i in range(len(held_out))}
    drawn = [everything[i].prompt for i in range(len(everything))]
    kept = [train[i].prompt for i in range(len(train))]
    assert theirs & set(drawn) and not theirs & set(kept)
    assert kept == [prompt for prompt in drawn if prompt not in theirs]
    with pytest.raises(UserError, match="all 20 prompts of task 'chain_sum' occur in disjoint_from too"):
        sums(size=20, seed=5, disjoint_from={"seed": 0, "size": 40})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"task": "chain_sums"}, "no task 'chain_sums'(.|\n)*did you mean .*chain_sum"),
        ({"task_args": {"speed": 3}}, "refuses its settings(.|\n)*speed"),
        ({"task_args": {"min_terms": 3, "max_terms": 2}}, "refuses its settings: max_terms must be >= min_terms"),
        ({"prompt_pattern": "(nowhere)"}, "matches nothing in item 0"),
    ],
)
def test_settings_that_do_not_work(options: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        sums(**options)[0]


@pytest.mark.parametrize(
    "options", [{"prompt_pattern": "("}, {"prompt_pattern": "x"}, {"task_args": {"seed": 3}}, {"size": 0}]
)
def test_settings_that_are_refused_in_the_config(options: Any) -> None:
    with pytest.raises(ValidationError):
        sums(**options)


def test_json_keeps_what_a_verifier_compares() -> None:
    value = {"a": (1, [2.5, None]), "b": {(0, 1): "x", 3: True}, "c": [("y",)]}
    assert from_json(json.loads(json.dumps(to_json(value)))) == value


@pytest.mark.parametrize("task", ["chain_sum", "rearc", "knights_knaves", "prime_factorization", "word_ladder"])
def test_the_verifier_accepts_the_reference_of_an_entry_from_json(task: str) -> None:
    item = make_task(task, seed=3, size=3, args={})[1]
    entry = {"question": item["question"], "answer": item["answer"], "metadata": to_json(item["metadata"])}
    request = {"task": task, "args": {}, "answer": item["answer"], "entry": entry}
    assert verify(json.loads(json.dumps(request))) == {"score": 1.0}
    assert verify(request | {"answer": "((( 12 x"})["score"] < 1


@pytest.fixture(scope="module")
def reward() -> ReasoningGymReward:
    return ReasoningGymReward(ReasoningGymRewardConfig(name="reasoning_gym", sample_timeout_s=2))


def test_reward(reward: ReasoningGymReward, sample: Any) -> None:
    example = sums()[0]
    given = {"answer": example.answer, "extra": example.extra}
    right, wrong, cut = reward([sample(f" {example.answer}\n", **given), sample("nothing", **given),
                                sample(str(example.answer), finish_reason="length", **given)])  # fmt: skip
    assert (right.value, right.correct) == (1.0, True)  # type: ignore[union-attr]
    assert wrong.value < 1 and wrong.correct is False  # type: ignore[union-attr]
    assert (cut.value, cut.correct) == (0.0, False)  # type: ignore[union-attr]


def test_a_response_that_the_verifier_chokes_on_is_wrong(reward: ReasoningGymReward, sample: Any) -> None:
    dataset = ReasoningGymDataset(ReasoningGymConfig(name="reasoning_gym", task="prime_factorization", size=1, seed=0))
    score = reward.judge(sample("((( 12 x", dataset[0].answer, extra=dataset[0].extra))
    assert (score.value, score.correct) == (0.0, False)


def test_a_sample_of_another_dataset_is_an_error(reward: ReasoningGymReward, sample: Any) -> None:
    with pytest.raises(ValueError, match="no reasoning-gym entry"):
        reward.judge(sample("3", "3"))
    broken = {"task": "prime_factorization", "question": "q", "metadata": {}}
    with pytest.raises(RuntimeError, match="ValueError: invalid literal"):
        reward.judge(sample("x", "no reference", extra=broken))


def test_answer_pattern_and_task(sample: Any) -> None:
    config = ReasoningGymRewardConfig(
        name="reasoning_gym", task="chain_sum", task_args=SUMS, answer_pattern=r"<a>(.*?)</a>"
    )
    reward = ReasoningGymReward(config)
    example = sums()[0]
    given = {"answer": example.answer, "extra": example.extra}
    scores = reward([sample(f"<a>no</a> hm <a>{example.answer}</a>", **given), sample(str(example.answer), **given)])
    assert [score.correct for score in scores] == [True, False]  # type: ignore[union-attr]
    with pytest.raises(UserError, match="no task 'nothing'"):
        ReasoningGymReward(ReasoningGymRewardConfig(name="reasoning_gym", task="nothing"))
    with pytest.raises(ValidationError, match="task_args is set without task"):
        ReasoningGymRewardConfig(name="reasoning_gym", task_args=SUMS)
