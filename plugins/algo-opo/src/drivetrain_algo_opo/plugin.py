"""What this distribution offers; nothing heavy is imported here."""

from __future__ import annotations

from collections.abc import Iterable

from drivetrain import AdvantageEstimatorSpec, AlgorithmSpec, hookimpl


@hookimpl
def drivetrain_algorithms() -> Iterable[AlgorithmSpec]:
    yield AlgorithmSpec(
        name="opo",
        summary="Exactly on-policy learning with the optimal, length-weighted reward baseline.",
        factory="drivetrain_algo_opo.algorithm:OPO",
        config="drivetrain_algo_opo.config:OPOConfig",
        requires=("backend.train",),
    )


@hookimpl
def drivetrain_advantage_estimators() -> Iterable[AdvantageEstimatorSpec]:
    yield AdvantageEstimatorSpec(
        name="opo",
        summary="Score minus the length-weighted mean of the scores of its group.",
        factory="drivetrain_algo_opo.advantage:opo_advantage",
        scope="group",
        compares_samples=True,
    )
