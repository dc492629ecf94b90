"""What this distribution offers; nothing heavy is imported here."""

from __future__ import annotations

from collections.abc import Iterable

from drivetrain import AlgorithmSpec, PolicyLossSpec, hookimpl


@hookimpl
def drivetrain_algorithms() -> Iterable[AlgorithmSpec]:
    yield AlgorithmSpec(
        name="my-algo",
        summary="REINFORCE with the mean reward of a prompt's samples as baseline.",
        factory="my_algo.algorithm:MyAlgo",
        config="my_algo.config:MyAlgoConfig",
        requires=("backend.train",),
    )


@hookimpl
def drivetrain_policy_losses() -> Iterable[PolicyLossSpec]:
    yield PolicyLossSpec(
        name="my-algo",
        summary="Advantage times log-probability.",
        factory="my_algo.losses:reinforce",
        scope="token",
    )
