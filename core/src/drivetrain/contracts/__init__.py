"""What a plugin's factory returns: the contracts between core and plugins."""

from drivetrain.contracts.accelerator import TorchAccelerator
from drivetrain.contracts.algorithm import Algorithm, LossTerm
from drivetrain.contracts.backend import BackendContext, TrainingBackend
from drivetrain.contracts.data import Dataset, Example, Message, Reward, RewardSample, Score
from drivetrain.contracts.hardware import Component, DeviceMemory, Event, Hardware
from drivetrain.contracts.loss import AdvantageEstimator, LossFunction
from drivetrain.contracts.mesh import DispatchMode, RankLayout
from drivetrain.contracts.observers import CheckpointSaved, RunEnded, RunFailed, RunStarted, StepEnded
from drivetrain.contracts.placement import (
    Environment,
    Executor,
    GroupPlan,
    HybridEngine,
    Meeting,
    WeightTransport,
    WorkerGroup,
)
from drivetrain.contracts.rollout import (
    Completion,
    GenerationRequest,
    RolloutContext,
    RolloutEngine,
    SamplingParams,
)
from drivetrain.contracts.tracker import RunInfo, RunResult, Tracker

__all__ = [
    "AdvantageEstimator", "Algorithm", "BackendContext", "CheckpointSaved", "Completion", "Component", "Dataset",
    "DeviceMemory", "DispatchMode", "Environment", "Event", "Example", "Executor", "GenerationRequest", "GroupPlan",
    "Hardware", "HybridEngine", "LossFunction", "LossTerm", "Meeting", "Message", "RankLayout", "Reward",
    "RewardSample", "RolloutContext", "RolloutEngine", "RunEnded", "RunFailed", "RunInfo", "RunResult", "RunStarted",
    "SamplingParams", "Score", "StepEnded", "TorchAccelerator", "Tracker", "TrainingBackend", "WeightTransport",
    "WorkerGroup",
]  # fmt: skip
