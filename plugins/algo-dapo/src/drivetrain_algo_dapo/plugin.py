"""What this distribution offers; nothing heavy is imported here."""

from __future__ import annotations

from collections.abc import Iterable

from drivetrain import AlgorithmSpec, hookimpl


@hookimpl
def drivetrain_algorithms() -> Iterable[AlgorithmSpec]:
    yield AlgorithmSpec(
        name="dapo",
        summary="GRPO with a higher upper clip, prompts drawn until their answers differ, and a price of length.",
        factory="drivetrain_algo_dapo.algorithm:DAPO",
        config="drivetrain_algo_dapo.config:DAPOConfig",
        requires=("backend.train", "rollout.log_probs"),
    )
