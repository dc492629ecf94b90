"""What a plugin offers: frozen, keyword-only descriptions that are cheap to collect.

A spec names things as ``"module:attribute"`` strings, so that listing plugins imports no engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

Scope = Literal["token", "sequence", "group", "batch"]


@dataclass(frozen=True, kw_only=True)
class PluginSpec:
    """One thing that can be selected by name.

    Attributes:
        name: what a config says to select it.
        summary: one line, shown by ``drivetrain plugins``.
        factory: ``"module:attribute"``, imported when the name is selected and a run starts.
        config: ``"module:Model"``, a pydantic model derived from ``drivetrain.PluginConfig``; its module imports
            no engine. None: the section takes a name and nothing else.
        contract_version: the version of the hook's contract that the factory's product follows.
        provides: capabilities offered, such as ``"rollout.live_module"``.
        requires: capabilities that some other selected plugin has to provide.
    """

    hook: ClassVar[str] = ""
    noun: ClassVar[str] = "plugin"
    versions: ClassVar[frozenset[int]] = frozenset({1})

    name: str
    summary: str
    factory: str
    config: str | None = None
    contract_version: int = 1
    provides: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class AlgorithmSpec(PluginSpec):
    """A training algorithm; the factory is a subclass of ``drivetrain.contracts.Algorithm``.

    Attributes:
        rewards: whether the algorithm scores completions, so that a config without ``rewards`` is refused.
        generates: whether it samples from the policy while it trains.
    """

    hook = "algorithms"
    noun = "algorithm"
    rewards: bool = True
    generates: bool = True


@dataclass(frozen=True, kw_only=True)
class AdvantageEstimatorSpec(PluginSpec):
    """An advantage estimator: a pure function of a batch's columns (see ``drivetrain.contracts.AdvantageEstimator``).

    Attributes:
        scope: the smallest unit whose rows have to be together for the result to be right.
        options: the keyword arguments that it takes; an algorithm's key of that name sets one.
    """

    hook = "advantage_estimators"
    noun = "advantage estimator"
    scope: Scope
    options: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PolicyLossSpec(PluginSpec):
    """A term of a training objective: a pure function (see ``drivetrain.contracts.LossFunction``).

    Attributes:
        scope: the smallest unit whose rows have to be together for the result to be right.
        options: the keyword arguments that it takes; an algorithm's key of that name sets one.
        needs: the model outputs that carry gradient in this term.
    """

    hook = "policy_losses"
    noun = "policy loss"
    scope: Scope
    options: tuple[str, ...] = ()
    needs: tuple[Literal["log_probs", "entropy", "values"], ...] = ("log_probs",)


@dataclass(frozen=True, kw_only=True)
class BackendSpec(PluginSpec):
    """A training engine; the factory is a subclass of ``drivetrain.contracts.TrainingBackend``."""

    hook = "backends"
    noun = "backend"


@dataclass(frozen=True, kw_only=True)
class ModelFamilySpec(PluginSpec):
    """Names and layout of a family of models, for a backend that builds models by itself.

    Attributes:
        model_types: the ``model_type`` values of Hugging Face configs that belong to the family.
        backend: name of the backend that the mapping is for.
    """

    hook = "model_families"
    noun = "model family"
    model_types: tuple[str, ...]
    backend: str


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec(PluginSpec):
    """An optimizer; the factory takes ``(parameters, config)`` and returns a ``torch.optim.Optimizer``."""

    hook = "optimizers"
    noun = "optimizer"


@dataclass(frozen=True, kw_only=True)
class RolloutSpec(PluginSpec):
    """A generation engine; the factory is a subclass of ``drivetrain.contracts.RolloutEngine``."""

    hook = "rollouts"
    noun = "rollout"


@dataclass(frozen=True, kw_only=True)
class HybridEngineSpec(PluginSpec):
    """Who holds the devices when; the factory is a subclass of ``drivetrain.contracts.HybridEngine``."""

    hook = "hybrid_engines"
    noun = "hybrid engine"


@dataclass(frozen=True, kw_only=True)
class WeightTransportSpec(PluginSpec):
    """How buckets of weights travel; the factory makes a ``drivetrain.contracts.WeightTransport``."""

    hook = "weight_transports"
    noun = "weight transport"


@dataclass(frozen=True, kw_only=True)
class DispatchModeSpec(PluginSpec):
    """How a call's arguments are split over ranks and its results collected; a ``DispatchMode``."""

    hook = "dispatch_modes"
    noun = "dispatch mode"


@dataclass(frozen=True, kw_only=True)
class ExecutorSpec(PluginSpec):
    """Where workers live; the factory is a subclass of ``drivetrain.contracts.Executor``."""

    hook = "executors"
    noun = "executor"


@dataclass(frozen=True, kw_only=True)
class HardwareSpec(PluginSpec):
    """A kind of device; the factory is a subclass of ``drivetrain.contracts.Hardware``.

    Attributes:
        fallback: true for what every machine has, chosen by ``hardware.name=auto`` when nothing else is found.
    """

    hook = "hardware"
    noun = "hardware"
    fallback: bool = False


@dataclass(frozen=True, kw_only=True)
class EnvironmentSpec(PluginSpec):
    """How an episode unfolds: turns, tools, masks; a ``drivetrain.contracts.Environment``."""

    hook = "environments"
    noun = "environment"


@dataclass(frozen=True, kw_only=True)
class RewardSpec(PluginSpec):
    """A reward; the factory takes its config and returns a ``drivetrain.contracts.Reward``."""

    hook = "rewards"
    noun = "reward"


@dataclass(frozen=True, kw_only=True)
class DatasetSpec(PluginSpec):
    """A set of prompts; the factory takes its config and returns a ``drivetrain.contracts.Dataset``."""

    hook = "datasets"
    noun = "dataset"


@dataclass(frozen=True, kw_only=True)
class TrackerSpec(PluginSpec):
    """A receiver of metrics; the factory is a subclass of ``drivetrain.contracts.Tracker``."""

    hook = "trackers"
    noun = "tracker"


@dataclass(frozen=True, kw_only=True)
class CommandSpec(PluginSpec):
    """A command of ``drivetrain``; the factory is a typer callback or a ``typer.Typer``."""

    hook = "commands"
    noun = "command"


@dataclass(frozen=True, kw_only=True)
class ConfigAliasSpec(PluginSpec):
    """Keys of another framework, accepted in place of ours.

    Attributes:
        aliases: from a foreign dotted key to ours; a key that ends with ``.*`` maps a whole section.
    """

    hook = "config_aliases"
    noun = "config alias"
    factory: str = ""
    aliases: Mapping[str, str] = field(default_factory=dict)


SPEC_TYPES: dict[str, type[PluginSpec]] = {
    t.hook: t
    for t in (
        AlgorithmSpec, AdvantageEstimatorSpec, PolicyLossSpec, BackendSpec, ModelFamilySpec, OptimizerSpec,
        RolloutSpec, HybridEngineSpec, WeightTransportSpec, DispatchModeSpec, ExecutorSpec, HardwareSpec,
        EnvironmentSpec, RewardSpec, DatasetSpec, TrackerSpec, CommandSpec, ConfigAliasSpec,
    )
}  # fmt: skip
