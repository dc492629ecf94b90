"""What this distribution offers; nothing heavy is imported here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from drivetrain import AdvantageEstimatorSpec, hookimpl


def _spec(name: str, **more: Any) -> AdvantageEstimatorSpec:
    return AdvantageEstimatorSpec(name=name, factory=f"drivetrain_advantages.estimators:{name}", **more)


@hookimpl
def drivetrain_advantage_estimators() -> Iterable[AdvantageEstimatorSpec]:
    yield _spec("dr_grpo", summary="Reward less the mean of its group.", scope="group", compares_samples=True)
    yield _spec(
        "rloo",
        summary="Reward less the mean of the group's other responses.",
        scope="group",
        compares_samples=True,
    )
    yield _spec(
        "reinforce_plus_plus",
        summary="Discounted return of each token, whitened over the batch.",
        scope="batch",
        options=("gamma",),
    )
    yield _spec(
        "reinforce_plus_plus_baseline",
        summary="Reward less the mean of its group, whitened over the batch.",
        scope="batch",
        compares_samples=True,
    )
    yield _spec(
        "remax",
        summary="Reward less that of the greedy response.",
        scope="sequence",
        needs=("reward_baselines",),
    )
    yield _spec(
        "gpg",
        summary="Reward less the mean of its group, scaled up for groups of equal rewards.",
        scope="batch",
        options=("f_norm",),
        compares_samples=True,
    )
    yield _spec(
        "pass_at_k",
        summary="Advantage of the reward that one of k responses is right, in closed form.",
        scope="group",
        options=("k", "threshold"),
        compares_samples=True,
    )
