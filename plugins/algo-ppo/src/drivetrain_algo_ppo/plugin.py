"""What this distribution offers; nothing heavy is imported here."""

from __future__ import annotations

from collections.abc import Iterable

from drivetrain import AlgorithmSpec, hookimpl


@hookimpl
def drivetrain_algorithms() -> Iterable[AlgorithmSpec]:
    yield AlgorithmSpec(
        name="ppo",
        summary="Proximal policy optimization: advantages from a critic, KL divergence charged to the reward.",
        factory="drivetrain_algo_ppo.algorithm:PPO",
        config="drivetrain_algo_ppo.config:PPOConfig",
        requires=("backend.train", "backend.values", "rollout.log_probs"),
    )
