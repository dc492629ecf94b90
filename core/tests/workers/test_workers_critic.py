"""The worker of the critic, and what it shares with the policy's."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drivetrain.builtin.local_executor import LocalWorkerGroup
from drivetrain.config import ModelConfig, PluginConfig
from drivetrain.contracts.algorithm import LossTerm
from drivetrain.contracts.mesh import RankLayout
from drivetrain.errors import NonFiniteError
from drivetrain.metrics import Mean
from drivetrain.numerics import Counts
from drivetrain.protocol import DataProto
from drivetrain.workers import ActorRolloutRefWorker, CriticWorker, model_worker
from drivetrain.workers.registration import registration

POLICY, JUDGE = ModelConfig(path=Path("policy")), ModelConfig(path=Path("judge"))


class Backend:
    """Keeps what it is told; its values are the number of the row."""

    offloads: frozenset[str] = frozenset()

    def __init__(self, config: PluginConfig, context: Any) -> None:
        self.config, self.context, self.calls = config, context, list[Any]()
        self.layout = RankLayout(tp_size=1)

    def initialize(self) -> None:
        self.calls.append("initialize")

    def forward(self, batch: DataProto, outputs: tuple[str, ...], *, temperature: float) -> dict[str, torch.Tensor]:
        assert outputs == ("values",) and temperature == 1.0
        return {"values": torch.arange(len(batch))[:, None].expand(-1, 2).float()}

    def update(self, *args: Any, **options: Any) -> dict[str, Mean]:
        self.calls.append((args, options))
        return {"loss": Mean(2.0, 1)}

    def save(self, folder: Path) -> None:
        (folder / "state").write_text(self.context.role)

    def load(self, folder: Path) -> None:
        self.calls.append((folder / "state").read_text())

    def export(self, folder: Path) -> None:
        self.calls.append(folder)

    def close(self) -> None:
        self.calls.append("close")


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve = model_worker.resolve
    monkeypatch.setattr(model_worker, "resolve", lambda hook, name: Backend if hook == "backends" else resolve)


def run(**sections: Any) -> Any:
    section = {"backend": PluginConfig(name="any"), "optimizer": "its optimizer", "max_grad_norm": 0.5}
    critic = SimpleNamespace(**{**section, "model": None, **sections})
    actor = SimpleNamespace(**{**section, "optimizer": "the actor's", "max_grad_norm": 2.0})
    return SimpleNamespace(critic=critic, actor=actor, model=POLICY, trainer=SimpleNamespace(seed=3), rollout=None,
                           hardware=PluginConfig(name="cpu"))  # fmt: skip


def batch() -> DataProto:
    return DataProto.from_dict({"response_mask": torch.ones(3, 2, dtype=torch.long)})


def test_a_critic_is_loaded_as_its_section_says(backends: None) -> None:
    for section, model in ((run(), POLICY), (run(model=JUDGE), JUDGE)):
        worker = CriticWorker(section, "critic")
        assert "cpu" in LocalWorkerGroup(worker).call("init_model")
        context = worker.backends["critic"].context
        assert (context.role, context.model, context.optimizer) == ("critic", model, "its optimizer")
        assert (context.max_grad_norm, context.seed) == (0.5, 3)
        assert worker.layout("train") is worker.backends["critic"].layout


def test_values_and_updates(backends: None) -> None:
    worker = CriticWorker(run(), "critic")
    group = LocalWorkerGroup(worker)
    group.call("init_model")
    assert group.call("compute_values", batch())["values"].tolist() == [[0, 0], [1, 1], [2, 2]]
    terms, counts = [LossTerm("value_clip")], Counts(tokens=6, sequences=3, groups=3)
    assert group.call("update_critic", batch(), terms, counts, 0.5) == {"loss": Mean(2.0, 1)}
    [(args, options)] = worker.backends["critic"].calls[1:]
    assert args[1:] == (terms, counts) and options == {"temperature": 1.0, "lr_factor": 0.5}
    assert registration(CriticWorker, "compute_values").dispatch_mode == "dp_compute_proto"
    assert registration(CriticWorker, "update_critic").dispatch_mode == "dp_compute_metric"


def test_values_that_are_not_finite_go_nowhere(backends: None) -> None:
    worker = CriticWorker(run(), "critic")
    group = LocalWorkerGroup(worker)
    group.call("init_model")
    values = torch.tensor([[0.0, 1.0], [torch.nan, torch.inf], [0.0, -torch.inf]])
    worker.backends["critic"].forward = lambda *args, **options: {"values": values}
    with pytest.raises(NonFiniteError, match="values of 2 of 3 rows are not finite.*worker critic, rank 0"):
        group.call("compute_values", batch())


def test_each_worker_saves_the_model_that_learns(backends: None, tmp_path: Path) -> None:
    workers = [CriticWorker(run(), "critic"), ActorRolloutRefWorker(run(), "actor")]
    for worker in workers:
        group = LocalWorkerGroup(worker)
        group.call("init_model")
        group.call("save_checkpoint", tmp_path)
        group.call("load_checkpoint", tmp_path)
        group.call("export_model", tmp_path / "out")
        worker.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["actor", "critic"]
    for worker, role in zip(workers, ("critic", "actor")):
        assert worker.backends[role].calls == ["initialize", role, tmp_path / "out", "close"]
    assert workers[1].backends["actor"].context.max_grad_norm == 2.0
