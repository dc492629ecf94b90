"""The worker of a reward model, on a backend that only counts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from drivetrain.builtin.local_executor import LocalWorkerGroup
from drivetrain.config import ModelConfig, PluginConfig, RewardModelConfig
from drivetrain.contracts.data import RewardSample
from drivetrain.contracts.mesh import RankLayout
from drivetrain.driver.rewarding import ModelReward
from drivetrain.protocol import DataProto
from drivetrain.workers import RewardModelWorker, model_worker
from drivetrain.workers.registration import registration
from drivetrain.workers.reward_model import score_of


class Backend:
    """Its logits are the number of tokens of a text, and zero."""

    offloads: frozenset[str] = frozenset()

    def __init__(self, config: PluginConfig, context: Any) -> None:
        self.config, self.context, self.closed = config, context, False
        self.layout = RankLayout(tp_size=1)

    def initialize(self) -> None:
        assert self.context.role == "reward" and self.context.optimizer is None

    def forward(self, batch: DataProto, outputs: tuple[str, ...], *, temperature: float) -> dict[str, torch.Tensor]:
        assert outputs == ("scores",) and temperature == 1.0
        lengths = batch["attention_mask"].sum(dim=1).float()
        return {"scores": torch.stack([lengths, torch.zeros(len(batch))], dim=1)}

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalWorkerGroup:
    resolve = model_worker.resolve
    monkeypatch.setattr(model_worker, "resolve", lambda hook, name: Backend if hook == "backends" else resolve)
    inner = Tokenizer(models.WordLevel({token: i for i, token in enumerate(["?", *"abcdefgh"])}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="?").save_pretrained(tmp_path)
    section = RewardModelConfig(model=ModelConfig(path=tmp_path), backend=PluginConfig(name="any"), label_index=0)
    run = SimpleNamespace(reward_model=section, trainer=SimpleNamespace(seed=3), hardware=PluginConfig(name="cpu"))
    made = LocalWorkerGroup(RewardModelWorker(run, "reward"))
    assert "cpu" in made.call("init_model")
    return made


def sample(prompt: str, response: str, messages: Any = None) -> RewardSample:
    return RewardSample(prompt=prompt, messages=messages, response=response, response_token_ids=[], answer=None,
                        uid="0", finish_reason="stop", data_source="")  # fmt: skip


def test_the_driver_gets_scores_that_say_nothing_about_right_and_wrong(group: LocalWorkerGroup) -> None:
    chat = [{"role": "user", "content": "abc"}]
    scores = ModelReward(group)([sample("ab", "c"), sample("a", ""), sample("<marks of the policy>", "d", chat)])
    assert [(score.value, score.correct) for score in scores] == [(3.0, None), (1.0, None), (6.0, None)]
    assert ModelReward(group)([]) == []
    assert registration(RewardModelWorker, "compute_rm_score").dispatch_mode == "dp_compute_proto"
    group.worker.close()
    assert group.worker.backends["reward"].closed


def test_scores_of_extreme_logits_are_finite() -> None:
    logits = torch.tensor([[300.0, -300.0, 0.0], [-300.0, 300.0, 0.0]])
    assert score_of(logits, "logit", 1).tolist() == [-300.0, 300.0]
    assert score_of(logits, "log_odds", 0).tolist() == [300.0, -600.0]
    assert score_of(logits, "probability", 0).tolist() == [1.0, 0.0]
    assert score_of(logits[:, :1], "probability", 0).tolist() == [1.0, 0.0]
