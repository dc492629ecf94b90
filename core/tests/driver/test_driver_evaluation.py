"""Evaluation and the metrics of any batch."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from driver_rig import phases

from drivetrain.config import EvaluationConfig
from drivetrain.contracts.data import Score
from drivetrain.driver.evaluation import SAMPLES_KEPT, evaluate, pass_at_k
from drivetrain.driver.rewarding import PanelReward, RewardPanel
from drivetrain.driver.stats import batch_metrics
from drivetrain.protocol import DataProto


class Letters:
    """Decodes token 0 to ``a``, 1 to ``b``, ..."""

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return "".join(chr(ord("a") + token) for token in tokens)


class Held:
    """Held-out prompts whose answer is ``a``; every third one is from ``easy``."""

    def __init__(self, count: int, sources: tuple[str, ...] = ("easy", "hard", "hard")) -> None:
        self.count, self.sources = count, sources

    def all_batches(self, prompts: int) -> Any:
        for start in range(0, self.count, prompts):
            numbers = range(start, min(start + prompts, self.count))
            yield DataProto.from_single_dict(
                {"number": torch.tensor(numbers), "uid": [f"u{n}" for n in numbers],
                 "raw_prompt": [f"q{n}" for n in numbers], "messages": [None] * len(numbers),
                 "answer": ["a" for _ in numbers], "extra": [{} for _ in numbers],
                 "data_source": [self.sources[n % len(self.sources)] for n in numbers]}
            )  # fmt: skip


def generate(prompts: DataProto, *, samples: int, temperature: float, phase: str) -> DataProto:
    """Answers ``a`` to easy prompts and ``bc`` to all others."""
    assert phase == "evaluate" and temperature == 0.0
    rows = prompts.repeat(samples)
    easy = torch.tensor([source == "easy" for source in rows["data_source"]])
    mask = torch.stack([torch.ones(len(rows)), (~easy).float()], dim=1).long()
    responses = torch.where(easy[:, None], torch.tensor([0, 9]), torch.tensor([1, 2]))
    return rows.with_columns(responses=responses, response_mask=mask, finish_reason=["stop"] * len(rows))


def judge(samples: Any) -> list[Score]:
    return [Score(2.0 * (s.response == s.answer), correct=s.response == s.answer) for s in samples]


def session(held: Held, reward: Any = judge, **options: Any) -> Any:
    return SimpleNamespace(
        run=SimpleNamespace(trainer=SimpleNamespace(eval=EvaluationConfig(**options))),
        eval_prompts=held, tokenizer=Letters(), phases=phases(),
        roles=SimpleNamespace(rollout=SimpleNamespace(generate=generate)),
        rewards=RewardPanel([PanelReward(label="judge", reward=reward, weight=0.5)], Letters()),
    )  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"batch_prompts": 4}, {"samples": 2}])
def test_metrics_by_data_source(options: dict[str, int]) -> None:
    got = evaluate(session(Held(6), **options)).metrics
    assert {name: value for name, value in got.items() if "@" not in name} == pytest.approx(
        {
            "eval/accuracy": 2 / 6, "eval/easy/accuracy": 1, "eval/hard/accuracy": 0,
            "eval/reward": 2 / 6, "eval/easy/reward": 1, "eval/hard/reward": 0,
            "eval/reward/judge": 4 / 6, "eval/response_tokens": (2 * 1 + 4 * 2) / 6,
        }
    )  # fmt: skip


def one_of(right: dict[str, int]) -> Any:
    """Generates answers of which the first so many of a prompt are right."""

    def generate(prompts: DataProto, *, samples: int, **_: Any) -> DataProto:
        rows = prompts.repeat(samples)
        good = [n % samples < right[source] for n, source in enumerate(rows["data_source"])]
        responses = torch.tensor([[0] if yes else [1] for yes in good])
        ended = ["stop"] * len(rows)
        return rows.with_columns(responses=responses, response_mask=torch.ones_like(responses), finish_reason=ended)

    return generate


@pytest.mark.parametrize("batch_prompts", [256, 4])
def test_several_completions_tell_mean_and_pass(batch_prompts: int) -> None:
    run = session(Held(6), samples=6, batch_prompts=batch_prompts)
    run.roles.rollout.generate = one_of({"easy": 5, "hard": 2})
    got = evaluate(run).metrics
    easy = {"mean@6": 5 / 6, "pass@1": 5 / 6, "pass@2": 1.0, "pass@4": 1.0, "pass@6": 1.0}
    hard = {"mean@6": 2 / 6, "pass@1": 2 / 6, "pass@2": 1 - 6 / 15, "pass@4": 1 - 1 / 15, "pass@6": 1.0}
    wanted = {f"eval/easy/{name}": value for name, value in easy.items()}
    wanted |= {f"eval/hard/{name}": value for name, value in hard.items()}
    wanted |= {f"eval/{name}": (2 * easy[name] + 4 * hard[name]) / 6 for name in easy}
    assert {name: value for name, value in got.items() if "@" in name} == pytest.approx(wanted, abs=1e-12)


def test_one_completion_tells_no_more_than_its_accuracy() -> None:
    assert not [name for name in evaluate(session(Held(6))).metrics if "@" in name]


@pytest.mark.parametrize("n", [1, 3, 8])
def test_pass_at_k_counts_the_draws(n: int) -> None:
    """Against the definition: the share of all choices of k out of n that hold a right one."""
    rows = torch.tensor(list(itertools.product([0.0, 1.0], repeat=n)))[:: max(1, 2**n // 32)]
    for k in range(1, n + 1):
        draws = list(itertools.combinations(range(n), k))
        wanted = torch.stack([rows[:, list(draw)].amax(dim=1) for draw in draws]).double().mean(dim=0)
        torch.testing.assert_close(pass_at_k(rows.double(), k), wanted, rtol=0, atol=1e-12)


def test_one_source_is_not_repeated() -> None:
    got = evaluate(session(Held(3, ("easy",)))).metrics
    assert got.keys() == {"eval/accuracy", "eval/reward", "eval/reward/judge", "eval/response_tokens"}


def test_no_accuracy_where_no_reward_judges_correctness() -> None:
    got = evaluate(session(Held(3), reward=lambda samples: [1.0] * len(samples))).metrics
    assert not [name for name in got if "accuracy" in name] and got["eval/reward"] == 0.5


def test_the_first_samples_are_shown() -> None:
    shown = evaluate(session(Held(SAMPLES_KEPT + 9), batch_prompts=10)).samples
    assert [row["prompt"] for row in shown] == [f"q{n}" for n in range(SAMPLES_KEPT)]
    assert shown[:2] == [
        {"prompt": "q0", "response": "a", "answer": "a", "score": 1.0, "correct": True, "data_source": "easy",
         "finish_reason": "stop"},
        {"prompt": "q1", "response": "bc", "answer": "a", "score": 0.0, "correct": False, "data_source": "hard",
         "finish_reason": "stop"},
    ]  # fmt: skip


def scored(**columns: Any) -> DataProto:
    return DataProto.from_single_dict({"response_mask": torch.tensor([[1, 1, 1], [1, 0, 0]]), **columns})


def test_metrics_of_a_batch() -> None:
    columns = {"scores": torch.tensor([1.0, 0.0]), "reward/words": torch.tensor([3.0, 1.0]),
               "correct": torch.tensor([1.0, 0.0]), "finish_reason": ["length", "stop"]}  # fmt: skip
    assert batch_metrics(scored(**columns)) == {
        "reward": 0.5, "reward/words": 2.0, "accuracy": 0.5, "response_tokens": 2.0, "response_tokens_max": 3.0,
        "truncated": 0.5,
    }  # fmt: skip
    assert batch_metrics(scored()) == {"response_tokens": 2.0, "response_tokens_max": 3.0}


def test_groups_that_teach_nothing_are_counted() -> None:
    """As a share of completions; without several completions of a prompt there are no groups."""
    scores = torch.tensor([1.0, 1.0, 0.5, 0.25, 0.1])
    alike = DataProto.from_single_dict({"response_mask": torch.ones(5, 2, dtype=torch.long), "scores": scores,
                                        "uid": ["a", "a", "b", "b", "c"]})  # fmt: skip
    assert batch_metrics(alike)["groups_without_signal"] == pytest.approx(3 / 5)
    single = alike.with_columns(uid=["a", "b", "c", "d", "e"])
    assert "groups_without_signal" not in batch_metrics(single)


def test_accuracy_needs_a_judgement_of_every_row() -> None:
    assert "accuracy" not in batch_metrics(scored(correct=torch.tensor([1.0, math.nan])))
