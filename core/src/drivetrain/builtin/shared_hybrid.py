"""The built-in hybrid engine: training and generation are one module, so nothing moves."""

from __future__ import annotations

from collections.abc import Mapping

from drivetrain.contracts.backend import TrainingBackend
from drivetrain.contracts.placement import HybridEngine
from drivetrain.contracts.rollout import RolloutEngine


class SharedWeights(HybridEngine):
    """Lets the rollout run the backend's own module. Weights are current by construction; nothing is copied."""

    shares = True

    def attach(self, backend: TrainingBackend | None, rollout: RolloutEngine | None) -> None:
        assert backend is not None and rollout is not None
        self._rollout = rollout
        rollout.attach(backend.live_module())

    def enter_generation(self, version: int) -> Mapping[str, float]:
        self._rollout.weight_version = version
        return {}

    def enter_training(self) -> Mapping[str, float]:
        return {}
