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
    **{name: "drivetrain.builtin.configs" for name in ("RecordConfig",)},
    **{name: "drivetrain.builtin.jsonl" for name in ("example_from_record",)},
    **{name: "drivetrain.builtin.per_sample" for name in ("PerSample",)},
    **{name: "drivetrain.protocol" for name in ("ColumnHandle", "DataProto")},
    **{name: "drivetrain.driver.roles" for name in ("Roles",)},
    **{name: "drivetrain.driver.advantage" for name in ("compute_advantage",)},
    **{name: "drivetrain.workers" for name in ("ActorRolloutRefWorker", "Worker", "register")},
}  # fmt: skip
_MODULES = ("config", "contracts", "errors", "metrics", "numerics", "protocol", "testing", "weights")

__all__ = ["__version__", *_ATTRIBUTES, *_MODULES]

if TYPE_CHECKING:  # what type checkers see in place of the table above
    # fmt: off
    from drivetrain import (
        config as config,
    )
    from drivetrain import (
        contracts as contracts,
    )
    from drivetrain import (
        errors as errors,
    )
    from drivetrain import (
        metrics as metrics,
    )
    from drivetrain import (
        numerics as numerics,
    )
    from drivetrain import (
        protocol as protocol,
    )
    from drivetrain import (
        testing as testing,
    )
    from drivetrain import (
        weights as weights,
    )
    from drivetrain.builtin.configs import (
        RecordConfig as RecordConfig,
    )
    from drivetrain.builtin.jsonl import (
        example_from_record as example_from_record,
    )
    from drivetrain.builtin.per_sample import (
        PerSample as PerSample,
    )
    from drivetrain.config import (
        AlgorithmConfig as AlgorithmConfig,
    )
    from drivetrain.config import (
        DatasetConfig as DatasetConfig,
    )
    from drivetrain.config import (
        ModelConfig as ModelConfig,
    )
    from drivetrain.config import (
        OptimizerConfig as OptimizerConfig,
    )
    from drivetrain.config import (
        PluginConfig as PluginConfig,
    )
    from drivetrain.config import (
        Problem as Problem,
    )
    from drivetrain.config import (
        RewardConfig as RewardConfig,
    )
    from drivetrain.config import (
        RolloutConfig as RolloutConfig,
    )
    from drivetrain.config import (
        RunConfig as RunConfig,
    )
    from drivetrain.config import (
        Section as Section,
    )
    from drivetrain.config import (
        check_options as check_options,
    )
    from drivetrain.contracts import (
        AdvantageEstimator as AdvantageEstimator,
    )
    from drivetrain.contracts import (
        Algorithm as Algorithm,
    )
    from drivetrain.contracts import (
        BackendContext as BackendContext,
    )
    from drivetrain.contracts import (
        Completion as Completion,
    )
    from drivetrain.contracts import (
        Dataset as Dataset,
    )
    from drivetrain.contracts import (
        DeviceMemory as DeviceMemory,
    )
    from drivetrain.contracts import (
        DispatchMode as DispatchMode,
    )
    from drivetrain.contracts import (
        Environment as Environment,
    )
    from drivetrain.contracts import (
        Example as Example,
    )
    from drivetrain.contracts import (
        Executor as Executor,
    )
    from drivetrain.contracts import (
        GenerationRequest as GenerationRequest,
    )
    from drivetrain.contracts import (
        GroupPlan as GroupPlan,
    )
    from drivetrain.contracts import (
        Hardware as Hardware,
    )
    from drivetrain.contracts import (
        HybridEngine as HybridEngine,
    )
    from drivetrain.contracts import (
        LossFunction as LossFunction,
    )
    from drivetrain.contracts import (
        LossTerm as LossTerm,
    )
    from drivetrain.contracts import (
        RankLayout as RankLayout,
    )
    from drivetrain.contracts import (
        Reward as Reward,
    )
    from drivetrain.contracts import (
        RewardSample as RewardSample,
    )
    from drivetrain.contracts import (
        RolloutContext as RolloutContext,
    )
    from drivetrain.contracts import (
        RolloutEngine as RolloutEngine,
    )
    from drivetrain.contracts import (
        RunInfo as RunInfo,
    )
    from drivetrain.contracts import (
        RunResult as RunResult,
    )
    from drivetrain.contracts import (
        SamplingParams as SamplingParams,
    )
    from drivetrain.contracts import (
        Score as Score,
    )
    from drivetrain.contracts import (
        Tracker as Tracker,
    )
    from drivetrain.contracts import (
        TrainingBackend as TrainingBackend,
    )
    from drivetrain.contracts import (
        WeightTransport as WeightTransport,
    )
    from drivetrain.contracts import (
        WorkerGroup as WorkerGroup,
    )
    from drivetrain.driver.advantage import (
        compute_advantage as compute_advantage,
    )
    from drivetrain.driver.roles import (
        Roles as Roles,
    )
    from drivetrain.errors import (
        CheckpointError as CheckpointError,
    )
    from drivetrain.errors import (
        ConfigError as ConfigError,
    )
    from drivetrain.errors import (
        DrivetrainError as DrivetrainError,
    )
    from drivetrain.errors import (
        ExpiredWeightsError as ExpiredWeightsError,
    )
    from drivetrain.errors import (
        NonFiniteError as NonFiniteError,
    )
    from drivetrain.errors import (
        PluginError as PluginError,
    )
    from drivetrain.errors import (
        RewardError as RewardError,
    )
    from drivetrain.errors import (
        RunError as RunError,
    )
    from drivetrain.errors import (
        UserError as UserError,
    )
    from drivetrain.errors import (
        WeightStreamError as WeightStreamError,
    )
    from drivetrain.protocol import (
        ColumnHandle as ColumnHandle,
    )
    from drivetrain.protocol import (
        DataProto as DataProto,
    )
    from drivetrain.seam.hookspecs import (
        hookimpl as hookimpl,
    )
    from drivetrain.seam.registry import (
        resolve as resolve,
    )
    from drivetrain.seam.specs import (
        AdvantageEstimatorSpec as AdvantageEstimatorSpec,
    )
    from drivetrain.seam.specs import (
        AlgorithmSpec as AlgorithmSpec,
    )
    from drivetrain.seam.specs import (
        BackendSpec as BackendSpec,
    )
    from drivetrain.seam.specs import (
        CommandSpec as CommandSpec,
    )
    from drivetrain.seam.specs import (
        ConfigAliasSpec as ConfigAliasSpec,
    )
    from drivetrain.seam.specs import (
        DatasetSpec as DatasetSpec,
    )
    from drivetrain.seam.specs import (
        DispatchModeSpec as DispatchModeSpec,
    )
    from drivetrain.seam.specs import (
        EnvironmentSpec as EnvironmentSpec,
    )
    from drivetrain.seam.specs import (
        ExecutorSpec as ExecutorSpec,
    )
    from drivetrain.seam.specs import (
        HardwareSpec as HardwareSpec,
    )
    from drivetrain.seam.specs import (
        HybridEngineSpec as HybridEngineSpec,
    )
    from drivetrain.seam.specs import (
        ModelFamilySpec as ModelFamilySpec,
    )
    from drivetrain.seam.specs import (
        OptimizerSpec as OptimizerSpec,
    )
    from drivetrain.seam.specs import (
        PluginSpec as PluginSpec,
    )
    from drivetrain.seam.specs import (
        PolicyLossSpec as PolicyLossSpec,
    )
    from drivetrain.seam.specs import (
        RewardSpec as RewardSpec,
    )
    from drivetrain.seam.specs import (
        RolloutSpec as RolloutSpec,
    )
    from drivetrain.seam.specs import (
        TrackerSpec as TrackerSpec,
    )
    from drivetrain.seam.specs import (
        WeightTransportSpec as WeightTransportSpec,
    )
    from drivetrain.workers import (
        ActorRolloutRefWorker as ActorRolloutRefWorker,
    )
    from drivetrain.workers import (
        Worker as Worker,
    )
    from drivetrain.workers import (
        register as register,
    )
    # fmt: on


def __getattr__(name: str) -> Any:
    if name in _ATTRIBUTES:
        return getattr(importlib.import_module(_ATTRIBUTES[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"drivetrain.{name}")
    raise AttributeError(f"module 'drivetrain' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
