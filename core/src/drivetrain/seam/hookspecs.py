"""The hooks of drivetrain: what a plugin may offer and what it may observe.

A plugin is a module (usually named ``plugin``) that implements some of these with ``@drivetrain.hookimpl`` and is
announced by its distribution under the entry-point group ``drivetrain``::

    [project.entry-points.drivetrain]
    my-plugin = "my_package.plugin"

Collecting hooks return specs, which name everything else as ``"module:attribute"``; the plugin module itself
imports no engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from drivetrain.contracts.observers import CheckpointSaved, RunEnded, RunFailed, RunStarted, StepEnded
    from drivetrain.seam import specs

hookspec = pluggy.HookspecMarker("drivetrain")
hookimpl = pluggy.HookimplMarker("drivetrain")

# -------------------------------------------------------------------------------------------------------------------
# Collecting hooks: every implementation returns an iterable of specs
# -------------------------------------------------------------------------------------------------------------------


@hookspec
def drivetrain_algorithms() -> Iterable[specs.AlgorithmSpec]:
    """Offer training algorithms.

    Example::

        from drivetrain import AlgorithmSpec, hookimpl

        @hookimpl
        def drivetrain_algorithms():
            yield AlgorithmSpec(
                name="my-algo",
                summary="One line that says what it does.",
                factory="my_package.algorithm:MyAlgorithm",
                config="my_package.config:MyConfig",
            )

    Returns:
        an iterable of ``AlgorithmSpec``.
    """


@hookspec
def drivetrain_advantage_estimators() -> Iterable[specs.AdvantageEstimatorSpec]:
    """Offer advantage estimators, selected by ``algorithm.advantage``.

    Example::

        from drivetrain import AdvantageEstimatorSpec, hookimpl

        @hookimpl
        def drivetrain_advantage_estimators():
            yield AdvantageEstimatorSpec(
                name="centred",
                summary="Score minus the mean of its group.",
                factory="my_package.advantages:centred",
                scope="group",
            )

    Returns:
        an iterable of ``AdvantageEstimatorSpec``.
    """


@hookspec
def drivetrain_policy_losses() -> Iterable[specs.PolicyLossSpec]:
    """Offer terms of training objectives, selected by ``algorithm.policy_loss``.

    Example::

        from drivetrain import PolicyLossSpec, hookimpl

        @hookimpl
        def drivetrain_policy_losses():
            yield PolicyLossSpec(
                name="reinforce",
                summary="Advantage times log-probability.",
                factory="my_package.losses:reinforce",
                scope="token",
            )

    Returns:
        an iterable of ``PolicyLossSpec``.
    """


@hookspec
def drivetrain_backends() -> Iterable[specs.BackendSpec]:
    """Offer training engines.

    Example::

        from drivetrain import BackendSpec, hookimpl

        @hookimpl
        def drivetrain_backends():
            yield BackendSpec(
                name="my-backend",
                summary="Trains on my accelerator.",
                factory="my_package.backend:MyBackend",
                provides=("backend.train", "backend.log_probs"),
            )

    Returns:
        an iterable of ``BackendSpec``.
    """


@hookspec
def drivetrain_model_families() -> Iterable[specs.ModelFamilySpec]:
    """Offer names and layouts of model families to a backend that builds models by itself.

    Example::

        from drivetrain import ModelFamilySpec, hookimpl

        @hookimpl
        def drivetrain_model_families():
            yield ModelFamilySpec(
                name="my-family",
                summary="Weights of MyModel for my-backend.",
                factory="my_package.families:my_family",
                model_types=("my_model",),
                backend="my-backend",
            )

    Returns:
        an iterable of ``ModelFamilySpec``.
    """


@hookspec
def drivetrain_optimizers() -> Iterable[specs.OptimizerSpec]:
    """Offer optimizers.

    Example::

        from drivetrain import OptimizerSpec, hookimpl

        @hookimpl
        def drivetrain_optimizers():
            yield OptimizerSpec(
                name="sgd",
                summary="Stochastic gradient descent.",
                factory="my_package.optimizers:sgd",
                config="my_package.config:SGDConfig",
            )

    Returns:
        an iterable of ``OptimizerSpec``.
    """


@hookspec
def drivetrain_rollouts() -> Iterable[specs.RolloutSpec]:
    """Offer generation engines.

    Example::

        from drivetrain import RolloutSpec, hookimpl

        @hookimpl
        def drivetrain_rollouts():
            yield RolloutSpec(
                name="my-engine",
                summary="Generates with my engine.",
                factory="my_package.rollout:MyEngine",
                provides=("rollout.log_probs",),
            )

    Returns:
        an iterable of ``RolloutSpec``.
    """


@hookspec
def drivetrain_hybrid_engines() -> Iterable[specs.HybridEngineSpec]:
    """Offer ways in which training and generation share devices.

    Example::

        from drivetrain import HybridEngineSpec, hookimpl

        @hookimpl
        def drivetrain_hybrid_engines():
            yield HybridEngineSpec(
                name="my-sharing",
                summary="Training and generation take turns.",
                factory="my_package.hybrid:MySharing",
            )

    Returns:
        an iterable of ``HybridEngineSpec``.
    """


@hookspec
def drivetrain_weight_transports() -> Iterable[specs.WeightTransportSpec]:
    """Offer ways in which buckets of weights travel.

    Example::

        from drivetrain import WeightTransportSpec, hookimpl

        @hookimpl
        def drivetrain_weight_transports():
            yield WeightTransportSpec(
                name="my-wire",
                summary="Weights over my interconnect.",
                factory="my_package.transport:MyWire",
            )

    Returns:
        an iterable of ``WeightTransportSpec``.
    """


@hookspec
def drivetrain_dispatch_modes() -> Iterable[specs.DispatchModeSpec]:
    """Offer ways to split the arguments of a call over ranks and to collect its results.

    Example::

        from drivetrain import DispatchModeSpec, hookimpl

        @hookimpl
        def drivetrain_dispatch_modes():
            yield DispatchModeSpec(
                name="my_mode",
                summary="Everything to even ranks.",
                factory="my_package.dispatch:MyMode",
            )

    Returns:
        an iterable of ``DispatchModeSpec``.
    """


@hookspec
def drivetrain_executors() -> Iterable[specs.ExecutorSpec]:
    """Offer places where workers live.

    Example::

        from drivetrain import ExecutorSpec, hookimpl

        @hookimpl
        def drivetrain_executors():
            yield ExecutorSpec(
                name="my-cluster",
                summary="Workers on my scheduler.",
                factory="my_package.executor:MyExecutor",
            )

    Returns:
        an iterable of ``ExecutorSpec``.
    """


@hookspec
def drivetrain_hardware() -> Iterable[specs.HardwareSpec]:
    """Offer a kind of device.

    Example::

        from drivetrain import HardwareSpec, hookimpl

        @hookimpl
        def drivetrain_hardware():
            yield HardwareSpec(
                name="my-chip",
                summary="The accelerator of a vendor.",
                factory="my_package.hardware:MyChip",
            )

    Returns:
        an iterable of ``HardwareSpec``.
    """


@hookspec
def drivetrain_environments() -> Iterable[specs.EnvironmentSpec]:
    """Offer ways in which an episode unfolds.

    Example::

        from drivetrain import EnvironmentSpec, hookimpl

        @hookimpl
        def drivetrain_environments():
            yield EnvironmentSpec(
                name="my-game",
                summary="Ten turns against a referee.",
                factory="my_package.environment:MyGame",
            )

    Returns:
        an iterable of ``EnvironmentSpec``.
    """


@hookspec
def drivetrain_rewards() -> Iterable[specs.RewardSpec]:
    """Offer rewards.

    Example::

        from drivetrain import RewardSpec, hookimpl

        @hookimpl
        def drivetrain_rewards():
            yield RewardSpec(
                name="my-reward",
                summary="One for an answer that compiles.",
                factory="my_package.rewards:MyReward",
                config="my_package.config:MyRewardConfig",
            )

    Returns:
        an iterable of ``RewardSpec``.
    """


@hookspec
def drivetrain_datasets() -> Iterable[specs.DatasetSpec]:
    """Offer sets of prompts.

    Example::

        from drivetrain import DatasetSpec, hookimpl

        @hookimpl
        def drivetrain_datasets():
            yield DatasetSpec(
                name="my-prompts",
                summary="Prompts from my database.",
                factory="my_package.data:MyPrompts",
                config="my_package.config:MyPromptsConfig",
            )

    Returns:
        an iterable of ``DatasetSpec``.
    """


@hookspec
def drivetrain_trackers() -> Iterable[specs.TrackerSpec]:
    """Offer receivers of metrics.

    Example::

        from drivetrain import TrackerSpec, hookimpl

        @hookimpl
        def drivetrain_trackers():
            yield TrackerSpec(
                name="my-dashboard",
                summary="Curves on my dashboard.",
                factory="my_package.tracker:MyTracker",
            )

    Returns:
        an iterable of ``TrackerSpec``.
    """


@hookspec
def drivetrain_commands() -> Iterable[specs.CommandSpec]:
    """Offer commands of the ``drivetrain`` program.

    Example::

        from drivetrain import CommandSpec, hookimpl

        @hookimpl
        def drivetrain_commands():
            yield CommandSpec(
                name="my-command",
                summary="Does one more thing.",
                factory="my_package.command:main",
            )

    Returns:
        an iterable of ``CommandSpec``.
    """


@hookspec
def drivetrain_config_aliases() -> Iterable[specs.ConfigAliasSpec]:
    """Offer another framework's config keys as other words for ours.

    Example::

        from drivetrain import ConfigAliasSpec, hookimpl

        @hookimpl
        def drivetrain_config_aliases():
            yield ConfigAliasSpec(
                name="their-framework",
                summary="Keys of their framework.",
                aliases={"their.actor.lr": "actor.optimizer.lr"},
            )

    Returns:
        an iterable of ``ConfigAliasSpec``.
    """


# -------------------------------------------------------------------------------------------------------------------
# Observers: called one by one on the driver; one that raises is reported and never stops a run
# -------------------------------------------------------------------------------------------------------------------


@hookspec
def drivetrain_run_started(event: RunStarted) -> None:
    """Observe that a run is about to take its first step.

    Example::

        from drivetrain import hookimpl

        @hookimpl
        def drivetrain_run_started(event):
            print(event.run_dir)

    Returns:
        nothing.
    """


@hookspec
def drivetrain_step_ended(event: StepEnded) -> None:
    """Observe the metrics of a finished step.

    Example::

        from drivetrain import hookimpl

        @hookimpl
        def drivetrain_step_ended(event):
            print(event.step, event.metrics.get("train/reward"))

    Returns:
        nothing.
    """


@hookspec
def drivetrain_checkpoint_saved(event: CheckpointSaved) -> None:
    """Observe that a checkpoint is complete and in place.

    Example::

        from drivetrain import hookimpl

        @hookimpl
        def drivetrain_checkpoint_saved(event):
            print(event.folder)

    Returns:
        nothing.
    """


@hookspec
def drivetrain_run_ended(event: RunEnded) -> None:
    """Observe that a run ended by itself or was asked to stop.

    Example::

        from drivetrain import hookimpl

        @hookimpl
        def drivetrain_run_ended(event):
            print(event.steps_done, "of", event.steps_planned)

    Returns:
        nothing.
    """


@hookspec
def drivetrain_run_failed(event: RunFailed) -> None:
    """Observe that a run ended with an error.

    Example::

        from drivetrain import hookimpl

        @hookimpl
        def drivetrain_run_failed(event):
            print(event.error)

    Returns:
        nothing.
    """
