from __future__ import annotations

import math
import pickle
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from drivetrain import DataProto, RewardError, RewardSample, Score, UserError
from drivetrain.builtin.configs import ExactMatchConfig
from drivetrain.builtin.exact_match import ExactMatch
from drivetrain.builtin.per_sample import PerSample
from drivetrain.driver.rewarding import PanelReward, RewardPanel

RESPONSES = ["12", "3", "", "45"]


@pytest.fixture
def batch(tokenizer: Any) -> DataProto:
    ids = torch.zeros(4, 4, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, text in enumerate(RESPONSES):
        tokens = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id] if text else []
        ids[row, : len(tokens)], mask[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64), 1
    return DataProto.from_dict(
        {"responses": ids, "response_mask": mask},
        {
            "raw_prompt": ["a", "b", "c", "d"], "messages": [None] * 4, "uid": ["0", "0", "1", "1"],
            "answer": ["12", "4", "", "45"], "data_source": ["s"] * 4,
            "extra": [{}] * 4, "finish_reason": ["stop", "stop", "stop", "length"],
        },
    )  # fmt: skip


def constant(*values: Any) -> Callable[[Sequence[RewardSample]], Any]:
    return lambda samples: list(values)


def panel(tokenizer: Any, **rewards: Any) -> RewardPanel:
    return RewardPanel([PanelReward(label=k, reward=v, timeout_s=0.5) for k, v in rewards.items()], tokenizer)


def test_weights_and_places(tokenizer: Any, batch: DataProto) -> None:
    exact = ExactMatch(ExactMatchConfig(name="exact_match"))
    rewards = [
        PanelReward(label="exact", reward=exact),
        PanelReward(label="other", reward=constant(1.0, 2, Score(3.0), 4.5), weight=0.5),
    ]
    scored = RewardPanel(rewards, tokenizer).score(batch)
    assert scored["reward/exact"].tolist() == [1, 0, 1, 0]
    assert scored["reward/other"].tolist() == [1, 2, 3, 4.5]
    assert scored["scores"].tolist() == [1.5, 1, 2.5, 2.25]
    assert scored["correct"].tolist() == [1, 0, 1, 0]
    assert scored["token_level_scores"].tolist() == [[0, 0, 1.5, 0], [0, 1, 0, 0], [0, 0, 0, 0], [0, 0, 2.25, 0]]
    for name in ("scores", "correct", "token_level_scores", "reward/exact"):
        assert scored[name].dtype == torch.float32
    assert "scores" not in batch


def test_samples_of_one_prompt_share_a_uid(tokenizer: Any, batch: DataProto) -> None:
    seen: list[str] = []

    def reward(samples: Sequence[RewardSample]) -> list[float]:
        seen.extend(sample.uid for sample in samples)
        return [0.0] * len(samples)

    panel(tokenizer, a=reward).score(batch)
    assert seen == ["0", "0", "1", "1"]


def test_correctness(tokenizer: Any, batch: DataProto) -> None:
    assert panel(tokenizer, a=constant(1.0, 1.0, 1.0, 1.0)).score(batch)["correct"].isnan().all()
    judges = {"a": constant(True, False, True, Score(1.0)), "b": constant(True, True, 0.5, 0.5)}
    correct = panel(tokenizer, **judges).score(batch)["correct"]
    assert correct[:3].tolist() == [1, 0, 1] and correct[3].isnan()


def test_a_score_stands_at_the_last_token_of_the_policy(tokenizer: Any, batch: DataProto) -> None:
    batch.batch["response_mask"] = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 1], [0, 0, 0, 0], [1, 0, 0, 0]])
    scored = panel(tokenizer, a=constant(1.0, 2.0, 3.0, 4.0)).score(batch)
    assert scored["token_level_scores"].tolist() == [[0, 0, 1, 0], [0, 0, 0, 2], [0, 0, 0, 0], [4, 0, 0, 0]]


class Fussy(PerSample):
    def judge(self, sample: RewardSample) -> Score:
        if sample.response == "3":
            raise KeyError("no three")
        return Score(1.0)


def test_the_sample_that_a_reward_raised_for_is_named(tokenizer: Any, batch: DataProto) -> None:
    with pytest.raises(RewardError, match="reward 'fussy' raised KeyError: 'no three'") as raised:
        panel(tokenizer, fussy=Fussy()).score(batch)
    assert "prompt 'b', response '3', answer '4', finish_reason 'stop'" in str(raised.value)
    assert isinstance(raised.value.__cause__, KeyError)
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)


def test_a_missing_answer_is_an_error(tokenizer: Any, batch: DataProto) -> None:
    batch.non_tensor_batch["answer"][1] = None
    with pytest.raises(RewardError, match="no answer to compare with"):
        panel(tokenizer, exact=ExactMatch(ExactMatchConfig(name="exact_match"))).score(batch)


def explode(samples: Sequence[RewardSample]) -> Any:
    raise SystemExit("out")


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        (explode, "raised SystemExit: out"),
        (lambda samples: time.sleep(5), r"took longer than timeout_s=0.5 for 4 samples"),
        (constant(1.0, 1.0, 1.0), "returned 3 scores for 4 samples"),
        (lambda samples: None, "returned None, not a list of scores"),
        (constant(1.0, math.nan, 1.0, 1.0), "returned nan, which is not finite"),
        (constant(1.0, 1.0, Score(math.inf), 1.0), "returned inf, which is not finite"),
        (constant(1.0, None, 1.0, 1.0), "returned None, which is no score"),
        (constant(1.0, "1", 1.0, 1.0), "returned '1', which is no score"),
        (constant(1.0, Score("1"), 1.0, 1.0), ".*which is no score"),  # type: ignore[arg-type]
    ],
)
def test_a_failing_reward_stops_the_run(tokenizer: Any, batch: DataProto, reward: Any, said: str) -> None:
    start = time.monotonic()
    with pytest.raises(RewardError, match=f"reward 'bad' {said}"):
        panel(tokenizer, good=constant(1.0, 1.0, 1.0, 1.0), bad=reward).score(batch)
    assert time.monotonic() - start < 3


def test_labels_are_distinct(tokenizer: Any) -> None:
    twice = PanelReward(label="same", reward=constant())
    with pytest.raises(UserError, match="two rewards are called 'same'"):
        RewardPanel([twice, twice], tokenizer)
