"""What a plugin offers: frozen, keyword-only descriptions that are cheap to collect.

A spec names things as ``"module:attribute"`` strings, so that listing plugins imports no engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

Scope = Literal["token", "sequence", "group", "batch"]

#: the type of spec that each collecting hook takes
SPEC_TYPES: dict[str, type[PluginSpec]] = {}


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

    def __init_subclass__(cls, *, hook: str = "", noun: str = "") -> None:
        if hook:  # a class derived from one of these belongs to the same hook
            cls.hook, cls.noun = hook, noun
            SPEC_TYPES[hook] = cls


@dataclass(frozen=True, kw_only=True)
class AlgorithmSpec(PluginSpec, hook="algorithms", noun="algorithm"):
    """A training algorithm; the factory is a subclass of ``drivetrain.contracts.Algorithm``.

    Attributes:
        rewards: whether the algorithm scores completions, so that a config without ``rewards`` is refused.
        generates: whether it samples from the policy while it trains.
    """

    rewards: bool = True
    generates: bool = True


@dataclass(frozen=True, kw_only=True)
class FunctionSpec(PluginSpec):
    """A pure function that an algorithm selects.

    Attributes:
        scope: the smallest unit whose rows have to be together for the result to be right.
        options: the keyword arguments that it takes; an algorithm's key of that name sets one.
    """

    scope: Scope
    options: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class AdvantageEstimatorSpec(FunctionSpec, hook="advantage_estimators", noun="advantage estimator"):
    """An advantage estimator: a pure function of columns (see ``drivetrain.contracts.AdvantageEstimator``).

    Attributes:
        needs: columns that it reads besides rewards and mask, such as ``values``.
        compares_samples: whether it compares the samples of a prompt, so that one of each would teach nothing.
    """

    needs: tuple[str, ...] = ()
    compares_samples: bool = False


@dataclass(frozen=True, kw_only=True)
class PolicyLossSpec(FunctionSpec, hook="policy_losses", noun="policy loss"):
    """A term of a training objective: a pure function (see ``drivetrain.contracts.LossFunction``).

    Attributes:
        needs: the model outputs that carry gradient in this term.
        weighted: whether it multiplies the loss of each token by the column ``rollout_is_weights``, if that is there.
    """

    needs: tuple[Literal["log_probs", "entropy", "values"], ...] = ("log_probs",)
    weighted: bool = False


@dataclass(frozen=True, kw_only=True)
class BackendSpec(PluginSpec, hook="backends", noun="backend"):
    """A training engine; the factory is a subclass of ``drivetrain.contracts.TrainingBackend``."""


@dataclass(frozen=True, kw_only=True)
class ModelFamilySpec(PluginSpec, hook="model_families", noun="model family"):
    """Names and layout of a family of models, for a backend that builds models by itself.

    Attributes:
        model_types: the ``model_type`` values of Hugging Face configs that belong to the family.
        backend: name of the backend that the mapping is for.
    """

    model_types: tuple[str, ...]
    backend: str


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec(PluginSpec, hook="optimizers", noun="optimizer"):
    """An optimizer; the factory takes ``(parameters, config)`` and returns a ``torch.optim.Optimizer``."""


@dataclass(frozen=True, kw_only=True)
class RolloutSpec(PluginSpec, hook="rollouts", noun="rollout"):
    """A generation engine; the factory is a subclass of ``drivetrain.contracts.RolloutEngine``."""


@dataclass(frozen=True, kw_only=True)
class HybridEngineSpec(PluginSpec, hook="hybrid_engines", noun="hybrid engine"):
    """Who holds the devices when; the factory is a subclass of ``drivetrain.contracts.HybridEngine``.

    One that provides ``hybrid_engine.two_groups`` has the rollout in a worker group of its own, in pools that placement
    names; it should require ``executor.placement``.
    """


@dataclass(frozen=True, kw_only=True)
class WeightTransportSpec(PluginSpec, hook="weight_transports", noun="weight transport"):
    """How buckets of weights travel; the factory makes a ``drivetrain.contracts.WeightTransport``.

    Capabilities: ``weight_transport.same_process`` (both ends are in one process), ``weight_transport.same_device``
    (both ends are on one device, in processes of their own).
    """


@dataclass(frozen=True, kw_only=True)
class DispatchModeSpec(PluginSpec, hook="dispatch_modes", noun="dispatch mode"):
    """How a call's arguments are split over ranks and its results collected: a ``DispatchMode``."""


@dataclass(frozen=True, kw_only=True)
class ExecutorSpec(PluginSpec, hook="executors", noun="executor"):
    """Where workers live; the factory is a subclass of ``drivetrain.contracts.Executor``."""


@dataclass(frozen=True, kw_only=True)
class HardwareSpec(PluginSpec, hook="hardware", noun="hardware"):
    """A kind of device; the factory is a subclass of ``drivetrain.contracts.Hardware``.

    Attributes:
        fallback: true for what every machine has, chosen by ``hardware.name=auto`` when nothing else is found.
    """

    fallback: bool = False


@dataclass(frozen=True, kw_only=True)
class EnvironmentSpec(PluginSpec, hook="environments", noun="environment"):
    """How an episode unfolds, its turns, tools and masks: a ``drivetrain.contracts.Environment``."""


@dataclass(frozen=True, kw_only=True)
class RewardSpec(PluginSpec, hook="rewards", noun="reward"):
    """A reward; the factory takes its config and returns a ``drivetrain.contracts.Reward``."""


@dataclass(frozen=True, kw_only=True)
class DatasetSpec(PluginSpec, hook="datasets", noun="dataset"):
    """A set of prompts; the factory takes its config and returns a ``drivetrain.contracts.Dataset``."""


@dataclass(frozen=True, kw_only=True)
class TrackerSpec(PluginSpec, hook="trackers", noun="tracker"):
    """A receiver of metrics; the factory is a subclass of ``drivetrain.contracts.Tracker``."""


@dataclass(frozen=True, kw_only=True)
class CommandSpec(PluginSpec, hook="commands", noun="command"):
    """A command of ``drivetrain``; the factory is a typer callback or a ``typer.Typer``."""


@dataclass(frozen=True, kw_only=True)
class ConfigAliasSpec(PluginSpec, hook="config_aliases", noun="config alias"):
    """Keys of another framework, accepted in place of ours.

    Attributes:
        aliases: from a foreign dotted key to ours; a key that ends with ``.*`` maps a whole section.
    """

    factory: str = ""
    aliases: Mapping[str, str] = field(default_factory=dict)
