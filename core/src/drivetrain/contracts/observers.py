"""The events that observers are told of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from drivetrain.contracts.tracker import RunInfo, RunResult


@dataclass(frozen=True, kw_only=True)
class RunStarted(RunInfo):
    """A run is about to take its first step."""


@dataclass(frozen=True, kw_only=True)
class StepEnded:
    """A step is over; ``metrics`` are those of the step, also where ``log_every`` keeps them from trackers."""

    step: int
    run_dir: Path
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved:
    """A checkpoint is complete and in place."""

    step: int
    run_dir: Path
    folder: Path


@dataclass(frozen=True, kw_only=True)
class RunEnded(RunResult):
    """A run ended by itself or was asked to stop."""


@dataclass(frozen=True, kw_only=True)
class RunFailed(RunResult):
    """A run ended with an error."""
