"""What drivetrain-optimizers offers. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable

from drivetrain import OptimizerSpec, hookimpl


@hookimpl
def drivetrain_optimizers() -> Iterable[OptimizerSpec]:
    yield OptimizerSpec(
        name="adamw_8bit",
        summary="AdamW whose moments of matrices take one byte a weight each, quantised in blocks.",
        factory="drivetrain_optimizers.adamw_8bit:adamw_8bit",
        config="drivetrain_optimizers.configs:AdamW8bitConfig",
    )
