"""What this distribution offers; nothing heavy is imported here."""

from __future__ import annotations

from collections.abc import Iterable

from drivetrain import AdvantageEstimatorSpec, AlgorithmSpec, hookimpl


@hookimpl
def drivetrain_algorithms() -> Iterable[AlgorithmSpec]:
    yield AlgorithmSpec(
        name="grpo",
        summary="Group relative policy optimization: rewards compared within the samples of a prompt.",
        factory="drivetrain_algo_grpo.algorithm:GRPO",
        config="drivetrain_algo_grpo.config:GRPOConfig",
        requires=("backend.train", "rollout.log_probs"),
    )


@hookimpl
def drivetrain_advantage_estimators() -> Iterable[AdvantageEstimatorSpec]:
    yield AdvantageEstimatorSpec(
        name="grpo",
        summary="Score minus the mean of its group, over the standard deviation of the group.",
        factory="drivetrain.numerics:group_advantage",
        scope="group",
        options=("normalize_by_std", "epsilon"),
        compares_samples=True,
    )
