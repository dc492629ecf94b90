"""When the parts of models are on the device: a backend that keeps a diary, and a rollout that looks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from drivetrain.builtin.local_executor import LocalWorkerGroup
from drivetrain.config import ModelConfig, PluginConfig
from drivetrain.contracts.mesh import RankLayout
from drivetrain.numerics import Counts
from drivetrain.protocol import DataProto
from drivetrain.workers import ActorRolloutRefWorker, CriticWorker, model_worker

ALL = frozenset({"parameters", "optimizer"})
HERE: dict[str, set[str]] = {}  # by role, the parts that are on the device
SEEN: list[tuple[str, dict[str, set[str]]]] = []  # at each call, what was on the device


def look(call: str) -> None:
    SEEN.append((call, {role: set(parts) for role, parts in HERE.items() if parts}))


class Backend:
    """Moves names."""

    offloads = ALL

    def __init__(self, config: PluginConfig, context: Any) -> None:
        self.config, self.context, self.layout = config, context, RankLayout()
        self.fails = False

    def initialize(self) -> None:
        HERE[self.context.role] = set(ALL)

    def offload(self, parts: Any) -> None:
        HERE[self.context.role] -= set(parts)

    def onload(self, parts: Any) -> None:
        HERE[self.context.role] |= set(parts)

    def forward(self, batch: DataProto, outputs: tuple[str, ...], *, temperature: float) -> dict[str, torch.Tensor]:
        look(f"{self.context.role} forward")
        return {name: torch.zeros(len(batch), 2) for name in outputs}

    def update(self, *args: Any, **options: Any) -> dict[str, Any]:
        look(f"{self.context.role} update")
        if self.fails:
            raise RuntimeError("failed")
        return {}

    def save(self, folder: Path) -> None:
        look("save")

    def load(self, folder: Path) -> None:
        look("load")

    def export(self, folder: Path) -> None:
        look("export")


class Hybrid:
    def enter_generation(self, version: int) -> dict[str, float]:
        look("sync")
        return {}

    def enter_training(self) -> dict[str, float]:
        return {}


@pytest.fixture(autouse=True)
def diary(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve = model_worker.resolve
    monkeypatch.setattr(model_worker, "resolve", lambda hook, name: Backend if hook == "backends" else resolve)
    monkeypatch.setattr(ActorRolloutRefWorker, "_temperature", 1.0)
    HERE.clear()
    SEEN.clear()


def started(worker: type, role: str) -> Any:
    section = {"backend": PluginConfig(name="any"), "optimizer": None, "max_grad_norm": None, "model": None}
    run: Any = SimpleNamespace(
        actor=SimpleNamespace(**section), ref=SimpleNamespace(**section), critic=SimpleNamespace(**section),
        model=ModelConfig(path=Path("policy")), trainer=SimpleNamespace(seed=3), hardware=PluginConfig(name="cpu"),
        actor_is_reference=False, rollout=None,
    )  # fmt: skip
    made = worker(run, role)
    LocalWorkerGroup(made).call("init_model")
    assert HERE == {role: set() for role in made.backends}  # before a rollout measures what memory is left
    return made


BATCH = DataProto.from_dict({"response_mask": torch.ones(3, 2, dtype=torch.long)})
UPDATE = (BATCH, (), Counts(tokens=6, sequences=3, groups=3))


def test_a_policy_and_its_reference_are_on_the_device_when_they_compute(tmp_path: Path) -> None:
    worker = started(ActorRolloutRefWorker, "actor_ref")
    worker.hybrid = Hybrid()
    worker.enter_generation(0)
    look("generate")
    worker.compute_log_prob(BATCH)
    worker.compute_ref_log_prob(BATCH)
    worker.update_actor(*UPDATE)
    look("between")
    worker.update_actor(*UPDATE)
    worker.enter_generation(1)
    look("generate")
    worker.save_checkpoint(tmp_path)
    worker.load_checkpoint(tmp_path)
    worker.export_model(tmp_path)
    look("end")
    parameters = {"parameters"}
    actor = {"actor": parameters}
    assert SEEN == [
        ("sync", actor), ("generate", {}), ("actor forward", actor),
        ("ref forward", {"actor": parameters, "ref": parameters}), ("actor update", {"actor": ALL}), ("between", actor),
        ("actor update", {"actor": ALL}), ("sync", actor), ("generate", {}), ("save", {"actor": ALL}),
        ("load", {"actor": ALL}), ("export", actor), ("end", {}),
    ]  # fmt: skip


def test_a_sync_that_fails_is_made_before_the_next_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = started(ActorRolloutRefWorker, "actor")
    rollout = SimpleNamespace(generate_batch=lambda requests: look("generate"), layout=RankLayout())
    worker.hybrid, worker.rollout = Hybrid(), rollout
    worker.config.rollout = SimpleNamespace()
    monkeypatch.setattr("drivetrain.workers.actor_rollout_ref.requests_of", lambda *args, **options: [])
    worker.enter_generation(0)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="lost"):
        patch.setattr(worker.hybrid, "enter_generation", Mock(side_effect=RuntimeError("lost")))
        worker.enter_generation(1)
    look("after")
    monkeypatch.setattr("drivetrain.workers.actor_rollout_ref.completions_to_batch", lambda *args, **options: BATCH)
    worker.generate_sequences(DataProto.from_dict(dict(BATCH.batch), meta_info={"pad_token_id": 0}))
    assert [call for call, _ in SEEN[:4]] == ["sync", "after", "sync", "generate"] and SEEN[1] == ("after", {})


def test_a_critic_leaves_after_each_call_even_one_that_fails() -> None:
    worker = started(CriticWorker, "critic")
    worker.compute_values(BATCH)
    look("after")
    worker.backends["critic"].fails = True
    with pytest.raises(RuntimeError, match="failed"):
        worker.update_critic(*UPDATE)
    look("after")
    assert SEEN == [("critic forward", {"critic": {"parameters"}}), ("after", {}), ("critic update", {"critic": ALL}),
                    ("after", {})]  # fmt: skip


def test_memory_is_measured_where_something_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = started(CriticWorker, "critic")
    figures = iter([(5, 0), (3, 9), (4, 0), (6, 7)])  # allocated and peak: before and after each call
    monkeypatch.setattr(
        worker.hardware, "memory", lambda: SimpleNamespace(**dict(zip(("allocated", "peak"), next(figures))))
    )
    worker.compute_values(BATCH)
    worker.compute_values(BATCH)
    group = LocalWorkerGroup(worker)
    assert group.call("take_memory") == {
        "memory/values_before_bytes": 5, "memory/values_peak_bytes": 9, "memory/values_after_bytes": 6,
    }  # fmt: skip
    assert group.call("take_memory") == {}
    monkeypatch.setattr(Backend, "offloads", frozenset())
    worker.compute_values(BATCH)  # asks nothing of the hardware
    assert group.call("take_memory") == {}


@pytest.mark.parametrize("shares", [False, True])
def test_weights_are_shared_where_a_hybrid_engine_says_so(shares: bool) -> None:
    worker = started(ActorRolloutRefWorker, "actor_ref")
    assert not worker.shares_weights()
    worker.hybrid = SimpleNamespace(shares=shares)
    assert LocalWorkerGroup(worker).call("shares_weights") is shares
