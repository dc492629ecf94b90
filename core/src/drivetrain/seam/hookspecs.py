"""The hooks of drivetrain: what a plugin may offer and what it may observe.

A plugin is a module (usually named ``plugin``) that implements some of these and is announced by its distribution
under the entry-point group ``drivetrain``::

    [project.entry-points.drivetrain]
    mine = "mine.plugin"

Collecting hooks return specs, which name everything else as ``"module:attribute"``; the plugin module itself
imports no engine. Paste an example below ``from drivetrain import hookimpl`` and the name of its spec.
"""
# mypy: disable-error-code="empty-body"

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from drivetrain.contracts.observers import CheckpointSaved, RunEnded, RunFailed, RunStarted, StepEnded
    from drivetrain.seam import specs

hookspec = pluggy.HookspecMarker("drivetrain")
hookimpl = pluggy.HookimplMarker("drivetrain")

# Collecting hooks: every implementation returns an iterable of specs.


@hookspec
def drivetrain_algorithms() -> Iterable[specs.AlgorithmSpec]:
    """Offer training algorithms::

        @hookimpl
        def drivetrain_algorithms():
            yield AlgorithmSpec(name="mine", summary="What it does.", factory="mine.algo:MyAlgo")

    Returns: an iterable of ``AlgorithmSpec``."""


@hookspec
def drivetrain_advantage_estimators() -> Iterable[specs.AdvantageEstimatorSpec]:
    """Offer advantage estimators, selected by ``algorithm.advantage``::

        @hookimpl
        def drivetrain_advantage_estimators():
            yield AdvantageEstimatorSpec(name="mine", summary="Centred.", factory="mine.work:centred", scope="group")

    Returns: an iterable of ``AdvantageEstimatorSpec``."""


@hookspec
def drivetrain_policy_losses() -> Iterable[specs.PolicyLossSpec]:
    """Offer terms of training objectives, selected by ``algorithm.policy_loss``::

        @hookimpl
        def drivetrain_policy_losses():
            yield PolicyLossSpec(name="mine", summary="A term.", factory="mine.losses:mine", scope="token")

    Returns: an iterable of ``PolicyLossSpec``."""


@hookspec
def drivetrain_backends() -> Iterable[specs.BackendSpec]:
    """Offer training engines::

        @hookimpl
        def drivetrain_backends():
            yield BackendSpec(name="mine", summary="My chip.", factory="mine.backend:Mine", provides=("backend.train",))

    Returns: an iterable of ``BackendSpec``."""


@hookspec
def drivetrain_model_families() -> Iterable[specs.ModelFamilySpec]:
    """Offer names and layouts of model families to a backend that builds models by itself::

        @hookimpl
        def drivetrain_model_families():
            yield ModelFamilySpec(name="mine", summary="Weights of MyModel.", factory="mine.families:mine",
                                  model_types=("my_model",), backend="my-backend")

    Returns: an iterable of ``ModelFamilySpec``."""


@hookspec
def drivetrain_optimizers() -> Iterable[specs.OptimizerSpec]:
    """Offer optimizers::

        @hookimpl
        def drivetrain_optimizers():
            yield OptimizerSpec(name="sgd", summary="Stochastic gradient descent.", factory="mine.optimizers:sgd")

    Returns: an iterable of ``OptimizerSpec``."""


@hookspec
def drivetrain_rollouts() -> Iterable[specs.RolloutSpec]:
    """Offer generation engines::

        @hookimpl
        def drivetrain_rollouts():
            yield RolloutSpec(name="mine", summary="Mine.", factory="mine.engine:Mine", provides=("rollout.log_probs",))

    Returns: an iterable of ``RolloutSpec``."""


@hookspec
def drivetrain_hybrid_engines() -> Iterable[specs.HybridEngineSpec]:
    """Offer ways in which training and generation share devices::

        @hookimpl
        def drivetrain_hybrid_engines():
            yield HybridEngineSpec(name="mine", summary="They take turns.", factory="mine.hybrid:MySharing")

    Returns: an iterable of ``HybridEngineSpec``."""


@hookspec
def drivetrain_weight_transports() -> Iterable[specs.WeightTransportSpec]:
    """Offer ways in which buckets of weights travel::

        @hookimpl
        def drivetrain_weight_transports():
            yield WeightTransportSpec(name="mine", summary="Over my wire.", factory="mine.transport:Wire")

    Returns: an iterable of ``WeightTransportSpec``."""


@hookspec
def drivetrain_dispatch_modes() -> Iterable[specs.DispatchModeSpec]:
    """Offer ways to split the arguments of a call over ranks and to collect its results::

        @hookimpl
        def drivetrain_dispatch_modes():
            yield DispatchModeSpec(name="mine", summary="To even ranks.", factory="mine.dispatch:Mode")

    Returns: an iterable of ``DispatchModeSpec``."""


@hookspec
def drivetrain_executors() -> Iterable[specs.ExecutorSpec]:
    """Offer places where workers live::

        @hookimpl
        def drivetrain_executors():
            yield ExecutorSpec(name="mine", summary="On my scheduler.", factory="mine.executor:Mine")

    Returns: an iterable of ``ExecutorSpec``."""


@hookspec
def drivetrain_hardware() -> Iterable[specs.HardwareSpec]:
    """Offer kinds of devices::

        @hookimpl
        def drivetrain_hardware():
            yield HardwareSpec(name="mine", summary="A vendor's chip.", factory="mine.hardware:MyChip")

    Returns: an iterable of ``HardwareSpec``."""


@hookspec
def drivetrain_environments() -> Iterable[specs.EnvironmentSpec]:
    """Offer ways in which an episode unfolds::

        @hookimpl
        def drivetrain_environments():
            yield EnvironmentSpec(name="mine", summary="Ten turns.", factory="mine.environment:MyGame")

    Returns: an iterable of ``EnvironmentSpec``."""


@hookspec
def drivetrain_rewards() -> Iterable[specs.RewardSpec]:
    """Offer rewards::

        @hookimpl
        def drivetrain_rewards():
            yield RewardSpec(name="mine", summary="One if it compiles.", factory="mine.rewards:Compiles")

    Returns: an iterable of ``RewardSpec``."""


@hookspec
def drivetrain_datasets() -> Iterable[specs.DatasetSpec]:
    """Offer sets of prompts::

        @hookimpl
        def drivetrain_datasets():
            yield DatasetSpec(name="mine", summary="From my database.", factory="mine.data:Prompts")

    Returns: an iterable of ``DatasetSpec``."""


@hookspec
def drivetrain_trackers() -> Iterable[specs.TrackerSpec]:
    """Offer receivers of metrics::

        @hookimpl
        def drivetrain_trackers():
            yield TrackerSpec(name="mine", summary="Curves on my board.", factory="mine.tracker:Board")

    Returns: an iterable of ``TrackerSpec``."""


@hookspec
def drivetrain_commands() -> Iterable[specs.CommandSpec]:
    """Offer commands of the ``drivetrain`` program::

        @hookimpl
        def drivetrain_commands():
            yield CommandSpec(name="mine", summary="One more thing.", factory="mine.command:main")

    Returns: an iterable of ``CommandSpec``."""


@hookspec
def drivetrain_config_aliases() -> Iterable[specs.ConfigAliasSpec]:
    """Offer another framework's config keys as other words for ours::

        @hookimpl
        def drivetrain_config_aliases():
            yield ConfigAliasSpec(name="theirs", summary="Keys of theirs.", aliases={"their.lr": "actor.optimizer.lr"})

    Returns: an iterable of ``ConfigAliasSpec``."""


# Observers: called one by one on the driver; one that raises is reported and never stops a run.


@hookspec
def drivetrain_run_started(event: RunStarted) -> None:
    """Observe that a run is about to take its first step::

        @hookimpl
        def drivetrain_run_started(event):
            print(event.run_dir)

    Returns: nothing."""


@hookspec
def drivetrain_step_ended(event: StepEnded) -> None:
    """Observe the metrics of a finished step::

        @hookimpl
        def drivetrain_step_ended(event):
            print(event.step, event.metrics.get("train/reward"))

    Returns: nothing."""


@hookspec
def drivetrain_checkpoint_saved(event: CheckpointSaved) -> None:
    """Observe that a checkpoint is complete and in place::

        @hookimpl
        def drivetrain_checkpoint_saved(event):
            print(event.folder)

    Returns: nothing."""


@hookspec
def drivetrain_run_ended(event: RunEnded) -> None:
    """Observe that a run ended by itself or was asked to stop::

        @hookimpl
        def drivetrain_run_ended(event):
            print(event.steps_done, "of", event.steps_planned)

    Returns: nothing."""


@hookspec
def drivetrain_run_failed(event: RunFailed) -> None:
    """Observe that a run ended with an error::

        @hookimpl
        def drivetrain_run_failed(event):
            print(event.error)

    Returns: nothing."""
