"""drivetrain: reinforcement-learning post-training of language models, from plugins.

The public API is ``drivetrain.__all__`` and the modules it names. Attributes are imported on use, so that
``import drivetrain`` loads neither torch nor an engine; ``__init__.pyi`` says the same to type checkers.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

# fmt: off
_NAMES: dict[str, tuple[str, ...]] = {
    "seam.hookspecs": ("hookimpl",),
    "seam.registry": ("get_registry", "resolve"),
    "seam.specs": (
        "AdvantageEstimatorSpec", "AlgorithmSpec", "BackendSpec", "CommandSpec", "ConfigAliasSpec", "DatasetSpec",
        "DispatchModeSpec", "EnvironmentSpec", "ExecutorSpec", "HardwareSpec", "HybridEngineSpec", "ModelFamilySpec",
        "OptimizerSpec", "PluginSpec", "PolicyLossSpec", "RewardSpec", "RolloutSpec", "TrackerSpec",
        "WeightTransportSpec",
    ),
    "config": (
        "AlgorithmConfig", "DatasetConfig", "ModelConfig", "OptimizerConfig", "PluginConfig", "PolicyGradientConfig",
        "Problem", "RewardConfig", "RolloutConfig", "RunConfig", "Section", "check_options", "chosen_options",
    ),
    "config.resolve": ("load_config",),
    "contracts": (
        "AdvantageEstimator", "Algorithm", "BackendContext", "Completion", "Component", "Dataset", "DeviceMemory",
        "DispatchMode", "Environment", "Event", "Example", "Executor", "GenerationRequest", "GroupPlan", "Hardware",
        "HybridEngine", "LossFunction", "LossTerm", "Meeting", "RankLayout", "Reward", "RewardSample", "RolloutContext",
        "RolloutEngine", "RunInfo", "RunResult", "SamplingParams", "Score", "TorchAccelerator", "Tracker",
        "TrainingBackend", "WeightTransport", "WorkerGroup",
    ),
    "errors": (
        "CheckpointError", "ConfigError", "DrivetrainError", "ExpiredWeightsError", "NonFiniteError", "PluginError",
        "RewardError", "RunError", "UserError", "WeightStreamError", "WorkerError",
    ),
    "builtin.configs": ("RecordConfig",),
    "builtin.dispatch": ("DPCompute", "MeshMode"),
    "builtin.jsonl": ("example_from_record",),
    "builtin.per_sample": ("PerSample", "SampleError"),
    "builtin.row_dispatch": ("DPComputeMetric", "DPComputeProto"),
    "protocol": ("ColumnHandle", "DataProto"),
    "driver.roles": ("Roles",),
    "driver.text": ("end_of_sequence_ids",),
    "driver.advantage": ("compute_advantage",),
    "driver.policy_gradient": ("PolicyGradient",),
    "workers": (
        "ActorRolloutRefWorker", "CriticWorker", "DispatchedCall", "Execute", "ModelWorker", "RewardModelWorker",
        "Worker", "dispatch_call", "register", "registration",
    ),
}
# fmt: on
_MODULES = ("config", "contracts", "errors", "metrics", "numerics", "protocol", "testing", "weights")
_HOME = {name: module for module, names in _NAMES.items() for name in names}

__all__ = ["__version__", *_HOME, *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"drivetrain.{_HOME[name]}"), name)
    if name in _MODULES:
        return importlib.import_module(f"drivetrain.{name}")
    raise AttributeError(f"module 'drivetrain' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
