"""A run as the driver tells it, without a driver."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from drivetrain import RunInfo, RunResult, Tracker

CONFIG = {"model": {"path": "models/tiny"}, "rewards": [{"name": "exact_match", "weight": 1.0}], "ref": None}
SAMPLES = [
    {"prompt": "3|4=", "response": "4\nü", "answer": "4", "score": 1.0, "correct": True, "data_source": "max"},
    {"prompt": "1,2=", "response": "\ud800", "answer": {"value": [2]}, "score": math.nan, "correct": None},
]


def told(tracker: Tracker, run_dir: Path, steps: Iterable[int], *, first_step: int = 1, course: float = 1.0) -> None:
    """Tell a tracker of a start and of steps; samples come with step 0 and every second one."""
    config: Any = SimpleNamespace(model_dump=lambda mode: CONFIG)
    tracker.started(RunInfo(run_dir=run_dir, config=config, notes=(), first_step=first_step, plan={}))
    for step in steps:
        tracker.phase(step, "update")
        if step % 2 == 0:
            tracker.samples(step, SAMPLES)
        tracker.metrics(step, numbers(step, course))


def numbers(step: int, course: float = 1.0) -> dict[str, float]:
    if step == 0:
        return {"eval/accuracy": 0.25}
    values = {"train/reward": course * step, "train/reward/exact_match": course * step, "train/kl": math.nan,
              "train/grad_norm": math.inf}  # fmt: skip
    return {**values, "eval/accuracy": 0.5} if step % 2 == 0 else values


@pytest.fixture
def tell() -> Callable[..., None]:
    return told


@pytest.fixture
def result(tmp_path: Path) -> Callable[..., RunResult]:
    def make(status: str = "finished", error: str | None = None) -> RunResult:
        return RunResult(status=status, steps_done=3, steps_planned=4, run_dir=tmp_path, last_metrics={}, error=error)

    return make


@pytest.fixture(autouse=True)
def by_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Neither credentials nor settings of the machine, no reports of use, and nothing left in the current folder."""
    monkeypatch.chdir(tmp_path)
    home = tmp_path_factory.mktemp("home")
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_PROJECT", "WANDB_ENTITY", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": str(home), "WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true",
                        "DO_NOT_TRACK": "true", "NETRC": str(home / "netrc"),
                        "WANDB_CONFIG_DIR": str(home)}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
