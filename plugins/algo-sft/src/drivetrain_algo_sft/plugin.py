"""What this distribution offers; nothing heavy is imported here."""

from __future__ import annotations

from collections.abc import Iterable

from drivetrain import AlgorithmSpec, PolicyLossSpec, hookimpl


@hookimpl
def drivetrain_algorithms() -> Iterable[AlgorithmSpec]:
    yield AlgorithmSpec(
        name="sft",
        summary="Supervised fine-tuning: imitate the responses of a dataset.",
        factory="drivetrain_algo_sft.algorithm:SFT",
        config="drivetrain_algo_sft.config:SFTConfig",
        requires=("backend.train",),
        rewards=False,
        generates=False,
    )


@hookimpl
def drivetrain_policy_losses() -> Iterable[PolicyLossSpec]:
    yield PolicyLossSpec(
        name="nll",
        summary="Negative log-likelihood of the responses.",
        factory="drivetrain_algo_sft.loss:nll",
        scope="token",
        options=("aggregation",),
    )
