"""The reference: a model of its own, or the actor's backend without its adapter."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drivetrain.config import ModelConfig, PluginConfig
from drivetrain.contracts.backend import TrainingBackend
from drivetrain.protocol import DataProto
from drivetrain.workers import ActorRolloutRefWorker, model_worker

POLICY, OTHER = ModelConfig(path="policy"), ModelConfig(path="other")
BATCH = DataProto.from_single_dict({"responses": torch.zeros(3, 2, dtype=torch.long)})


class Backend:
    """Its log-probs are -1, its reference's -2."""

    offloads = frozenset[str]()

    def __init__(self, config: PluginConfig, context: Any) -> None:
        self.context = context

    def initialize(self) -> None:
        pass

    def forward(self, batch: DataProto, outputs: tuple[str, ...], *, temperature: float) -> dict[str, torch.Tensor]:
        assert temperature == 1.0
        return {name: torch.full((len(batch), 2), -1.0) for name in outputs}

    def reference_forward(
        self, batch: DataProto, outputs: tuple[str, ...], *, temperature: float
    ) -> dict[str, torch.Tensor]:
        assert outputs == ("log_probs",) and temperature == 1.0
        return {"log_probs": torch.full((len(batch), 2), -2.0)}


def worker(monkeypatch: pytest.MonkeyPatch, *, shared: bool, model: ModelConfig | None = None) -> ActorRolloutRefWorker:
    monkeypatch.setattr(model_worker, "resolve", lambda hook, name: Backend)
    monkeypatch.setattr(ActorRolloutRefWorker, "_temperature", 1.0)
    section = PluginConfig(name="any")
    run: Any = SimpleNamespace(
        model=POLICY, actor=SimpleNamespace(backend=section, optimizer=section, max_grad_norm=1.0),
        ref=SimpleNamespace(backend=section, model=model), actor_is_reference=shared,
        rollout=None, trainer=SimpleNamespace(seed=1), hardware=PluginConfig(name="cpu"),
    )  # fmt: skip
    made = ActorRolloutRefWorker(run, "actor_ref")
    made.init_model()
    return made


def test_an_actor_with_an_adapter_answers_for_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    made = worker(monkeypatch, shared=True)
    assert list(made.backends) == ["actor"]
    assert made.compute_ref_log_prob(BATCH)["ref_log_probs"].tolist() == [[-2.0, -2.0]] * 3


@pytest.mark.parametrize("model", [None, OTHER])
def test_another_reference_is_a_model_of_its_own(monkeypatch: pytest.MonkeyPatch, model: ModelConfig | None) -> None:
    made = worker(monkeypatch, shared=False, model=model)
    assert list(made.backends) == ["actor", "ref"]
    assert made.backends["ref"].context.model == (model or POLICY) and made.backends["ref"].context.optimizer is None
    assert made.compute_ref_log_prob(BATCH)["ref_log_probs"].tolist() == [[-1.0, -1.0]] * 3


def test_a_backend_offers_no_reference_unless_it_says_so() -> None:
    with pytest.raises(TypeError, match="backend 'any' does not offer backend.reference"):
        TrainingBackend.reference_forward(
            SimpleNamespace(config=PluginConfig(name="any")), BATCH, ("log_probs",), temperature=1.0
        )
