"""Trackers and observers are told everything, and none of them can stop a run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from driver_rig import Little

from drivetrain.contracts.observers import CheckpointSaved, StepEnded
from drivetrain.contracts.tracker import RunInfo, RunResult
from drivetrain.driver.tracking import Tracking

TRACKERS = """
    from drivetrain import Tracker

    class Notes(Tracker):
        def __getattribute__(self, name):
            if name in ("started", "phase", "metrics", "samples", "ended"):
                return lambda *told: NOTES.append((self.config.name, name, *told))
            return object.__getattribute__(self, name)

    class Fragile(Notes):
        def metrics(self, step, metrics):
            ...

        def __getattribute__(self, name):
            if name == "metrics":
                raise ValueError("no room left")
            return Notes.__getattribute__(self, name)

    NOTES = []
"""
PLUGIN = """
    from drivetrain import TrackerSpec, hookimpl

    @hookimpl
    def drivetrain_trackers():
        yield TrackerSpec(name="notes", summary="Keeps all.", factory="{package}.work:Notes")
        yield TrackerSpec(name="fragile", summary="Fails.", factory="{package}.work:Fragile")
"""
OBSERVER = """
    from drivetrain import hookimpl

    SEEN = []

    @hookimpl
    def drivetrain_run_started(event): SEEN.append(event)

    @hookimpl
    def drivetrain_step_ended(event): SEEN.append(event); {after}

    @hookimpl
    def drivetrain_checkpoint_saved(event): SEEN.append(event)

    @hookimpl
    def drivetrain_run_ended(event): SEEN.append(event)

    @hookimpl
    def drivetrain_run_failed(event): SEEN.append(event)
"""


@pytest.fixture
def tracking(little: Little):
    """Tracking with the named trackers, and what tracker ``notes`` was told."""

    def make(*names: str) -> tuple[Tracking, list[Any]]:
        package = little.add("acme-notes", PLUGIN, {"work.py": TRACKERS})
        made = Tracking(SimpleNamespace(trackers=[SimpleNamespace(name=name) for name in names]))
        return made, little.module(f"{package}.work").NOTES

    return make


def result(status: str = "finished") -> RunResult:
    return RunResult(status=status, steps_done=1, steps_planned=2, run_dir=Path("r"), last_metrics={})


def test_every_tracker_is_told_everything(tracking) -> None:
    made, notes = tracking("notes", "notes")
    info = RunInfo(run_dir=Path("r"), config=SimpleNamespace(), notes=(), first_step=1, plan={})
    made.started(info)
    made.progress.step = 7
    made.phase("update")
    made.metrics(7, {"a": 1.0})
    made.samples(7, [{"prompt": "p"}])
    made.ended(result())
    told = [("started", info), ("phase", 7, "update"), ("metrics", 7, {"a": 1.0}), ("samples", 7, [{"prompt": "p"}]),
            ("ended", result())]  # fmt: skip
    assert notes == [("notes", *call) for call in told for _ in range(2)]


def test_a_tracker_that_raises_is_reported_once_and_left_out(tracking, capsys: pytest.CaptureFixture[str]) -> None:
    made, notes = tracking("fragile", "notes")
    for step in (1, 2):
        made.metrics(step, {})
    made.ended(result())
    assert [(name, call) for name, call, *_ in notes] == [
        ("notes", "metrics"),
        ("notes", "metrics"),
        ("notes", "ended"),
    ]
    said = capsys.readouterr().err.splitlines()
    assert said == ["warning: tracker 'fragile' raised ValueError: no room left; it is left out from here on"]


def test_observers_see_events_and_cannot_stop_a_run(little: Little, capsys: pytest.CaptureFixture[str]) -> None:
    first = little.add("acme-first", OBSERVER.replace("{after}", "raise OSError('gone')"))
    second = little.add("acme-second", OBSERVER.replace("{after}", "pass"))
    made = Tracking(SimpleNamespace(trackers=[]))
    made.started(RunInfo(run_dir=Path("r"), config=SimpleNamespace(), notes=("n",), first_step=3, plan={}))
    made.step_ended(StepEnded(step=3, run_dir=Path("r"), metrics={"a": 1.0}))
    made.checkpoint_saved(CheckpointSaved(step=3, run_dir=Path("r"), folder=Path("c")))
    made.ended(result("interrupted"))
    made.ended(result("failed"))
    for package in (first, second):
        kinds = [type(event).__name__ for event in little.module(f"{package}.plugin").SEEN]
        assert kinds == ["RunStarted", "StepEnded", "CheckpointSaved", "RunEnded", "RunFailed"]
    assert little.module(f"{second}.plugin").SEEN[0].first_step == 3
    [said] = capsys.readouterr().err.splitlines()
    assert "acme-first" in said and "OSError: gone" in said
