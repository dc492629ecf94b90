"""What this distribution offers; nothing heavy is imported here."""

from __future__ import annotations

from collections.abc import Iterable

from drivetrain import PolicyLossSpec, hookimpl


@hookimpl
def drivetrain_policy_losses() -> Iterable[PolicyLossSpec]:
    yield PolicyLossSpec(
        name="my-loss",
        summary="Advantage times probability ratio, with a penalty on the distance of the policies.",
        factory="my_loss.loss:penalized",
        scope="token",
        options=("penalty", "aggregation", "scale"),
    )
