"""drivetrain: reinforcement-learning post-training of language models, from plugins.

The public API is ``drivetrain.__all__`` and the modules it names. Attributes are imported on use, so that
``import drivetrain`` loads neither torch nor an engine.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_ATTRIBUTES: dict[str, str] = {
    "hookimpl": "drivetrain.seam.hookspecs",
    "resolve": "drivetrain.seam.registry",
    **{
        name: "drivetrain.seam.specs"
        for name in (
            "AdvantageEstimatorSpec", "AlgorithmSpec", "BackendSpec", "CommandSpec", "ConfigAliasSpec", "DatasetSpec",
            "DispatchModeSpec", "EnvironmentSpec", "ExecutorSpec", "HardwareSpec", "HybridEngineSpec",
            "ModelFamilySpec", "OptimizerSpec", "PluginSpec", "PolicyLossSpec", "RewardSpec", "RolloutSpec",
            "TrackerSpec", "WeightTransportSpec",
        )
    },
    **{
        name: "drivetrain.config"
        for name in (
            "AlgorithmConfig", "DatasetConfig", "ModelConfig", "OptimizerConfig", "PluginConfig", "Problem",
            "RewardConfig", "RolloutConfig", "RunConfig", "Section", "check_options",
        )
    },
    **{
        name: "drivetrain.contracts"
        for name in (
            "AdvantageEstimator", "Algorithm", "BackendContext", "Completion", "Dataset", "DeviceMemory",
            "DispatchMode", "Environment", "Example", "Executor", "GenerationRequest", "GroupPlan", "Hardware",
            "HybridEngine", "LossFunction", "LossTerm", "RankLayout", "Reward", "RewardSample", "RolloutContext",
            "RolloutEngine", "RunInfo", "RunResult", "SamplingParams", "Score", "Tracker", "TrainingBackend",
            "WeightTransport", "WorkerGroup",
        )
    },
    **{
        name: "drivetrain.errors"
        for name in (
            "CheckpointError", "ConfigError", "DrivetrainError", "ExpiredWeightsError", "NonFiniteError",
            "PluginError", "RewardError", "RunError", "UserError", "WeightStreamError",
        )
    },
    **{name: "drivetrain.protocol" for name in ("ColumnHandle", "DataProto")},
    **{name: "drivetrain.driver.roles" for name in ("Roles",)},
    **{name: "drivetrain.driver.advantage" for name in ("compute_advantage",)},
    **{name: "drivetrain.workers" for name in ("ActorRolloutRefWorker", "Worker", "register")},
}  # fmt: skip
_MODULES = ("config", "contracts", "errors", "metrics", "numerics", "protocol", "testing", "weights")

__all__ = ["__version__", *_ATTRIBUTES, *_MODULES]

if TYPE_CHECKING:
    from drivetrain import config, contracts, errors, metrics, numerics, protocol, testing, weights


def __getattr__(name: str) -> Any:
    if name in _ATTRIBUTES:
        return getattr(importlib.import_module(_ATTRIBUTES[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"drivetrain.{name}")
    raise AttributeError(f"module 'drivetrain' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
