"""The config: its shape, its layers and its checks."""

from drivetrain.config.base import (
    AlgorithmConfig,
    DatasetConfig,
    OptimizerConfig,
    PluginConfig,
    Problem,
    RewardConfig,
    RolloutConfig,
    Section,
    Written,
)
from drivetrain.config.checks import check_options, chosen_options
from drivetrain.config.models import (
    ActorConfig,
    CriticConfig,
    DataConfig,
    EvaluationConfig,
    HealthConfig,
    JudgeConfig,
    ModelConfig,
    PlacementConfig,
    ProfilerConfig,
    ReferenceConfig,
    RewardModelConfig,
    RunConfig,
    ScheduleConfig,
    TrainerConfig,
)
from drivetrain.config.policy_gradient import PolicyGradientConfig

__all__ = [
    "ActorConfig", "AlgorithmConfig", "CriticConfig", "DataConfig", "DatasetConfig", "EvaluationConfig",
    "HealthConfig", "JudgeConfig", "ModelConfig", "OptimizerConfig", "PlacementConfig", "PluginConfig",
    "PolicyGradientConfig", "Problem", "ProfilerConfig", "ReferenceConfig", "RewardConfig", "RewardModelConfig",
    "RolloutConfig", "RunConfig", "ScheduleConfig", "Section", "TrainerConfig", "Written", "check_options",
    "chosen_options",
]  # fmt: skip
