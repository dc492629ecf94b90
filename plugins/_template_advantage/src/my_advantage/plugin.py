"""What this distribution offers; nothing heavy is imported here."""

from __future__ import annotations

from collections.abc import Iterable

from drivetrain import AdvantageEstimatorSpec, hookimpl


@hookimpl
def drivetrain_advantage_estimators() -> Iterable[AdvantageEstimatorSpec]:
    yield AdvantageEstimatorSpec(
        name="my-advantage",
        summary="Score minus the mean of its group, within a bound.",
        factory="my_advantage.advantage:bounded",
        scope="group",
        options=("bound",),
    )
