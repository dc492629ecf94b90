"""What this distribution offers; nothing heavy is imported here."""

from __future__ import annotations

from collections.abc import Iterable

from drivetrain import AlgorithmSpec, hookimpl


@hookimpl
def drivetrain_algorithms() -> Iterable[AlgorithmSpec]:
    yield AlgorithmSpec(
        name="spin",
        summary="Self-play fine-tuning: prefer the dataset's responses to the policy's own.",
        factory="drivetrain_algo_spin.algorithm:SPIN",
        config="drivetrain_algo_spin.config:SPINConfig",
        requires=("backend.train", "backend.log_probs"),
        rewards=False,
    )
