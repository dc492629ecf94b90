"""The course of the learning rate over the steps of a run: a pure function, so resuming needs no state."""

from __future__ import annotations

import math

from drivetrain.config import ScheduleConfig


def lr_factor(schedule: ScheduleConfig, step: int, total_steps: int) -> float:
    """Factor of the learning rate in a step.

    In the warm-up of ``w`` steps the factor is ``step / w``. After it, with ``x`` from 0 to 1 over the remaining
    steps and ``m = min_factor``: constant ``1``; linear ``1 - (1 - m) x``; cosine ``m + (1 - m) (1 + cos(pi x)) / 2``.

    Args:
        step: from 1.
        total_steps: of the run.
    """
    warmup = schedule.warmup_steps
    if step <= warmup:
        return step / warmup
    if schedule.name == "constant":
        return 1.0
    x = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    low = schedule.min_factor
    return 1 - (1 - low) * x if schedule.name == "linear" else low + (1 - low) * (1 + math.cos(math.pi * x)) / 2
