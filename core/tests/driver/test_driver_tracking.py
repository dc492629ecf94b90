"""Trackers and observers are told everything, and none of them can stop a run."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from driver_rig import Little

from drivetrain.contracts.observers import CheckpointSaved, StepEnded
from drivetrain.contracts.tracker import RunInfo, RunResult
from drivetrain.driver.tracking import Tracking

TRACKERS = """
    import threading

    from drivetrain import Tracker

    class Notes(Tracker):
        def __getattribute__(self, name):
            if name in ("started", "phase", "ranks", "metrics", "samples", "ended"):
                return lambda *told: NOTES.append((self.config.name, name, *told))
            return object.__getattribute__(self, name)

    class Fragile(Notes):
        def metrics(self, step, metrics):
            ...

        def __getattribute__(self, name):
            if name == "metrics":
                raise ValueError("no room left")
            return Notes.__getattribute__(self, name)

    class Behind(Notes):
        # takes a call when GATE opens, and keeps the thread that it is called in
        background = True

        def __getattribute__(self, name):
            if name in ("started", "phase", "ranks", "metrics", "samples", "ended"):
                GATE.wait()
                THREADS.add(threading.current_thread())
            return Notes.__getattribute__(self, name)

    class FragileBehind(Behind):
        def __getattribute__(self, name):
            if name == "metrics":
                GATE.wait()
                raise SystemExit("no room left")
            return Behind.__getattribute__(self, name)

    NOTES, GATE, THREADS = [], threading.Event(), set()
"""
PLUGIN = """
    from drivetrain import TrackerSpec, hookimpl

    @hookimpl
    def drivetrain_trackers():
        yield TrackerSpec(name="notes", summary="Keeps all.", factory="{package}.work:Notes")
        yield TrackerSpec(name="fragile", summary="Fails.", factory="{package}.work:Fragile")
        yield TrackerSpec(name="behind", summary="Waits.", factory="{package}.work:Behind")
        yield TrackerSpec(name="fragile-behind", summary="Fails.", factory="{package}.work:FragileBehind")
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
    made.ranks("update", 1, 2)
    made.metrics(7, {"a": 1.0})
    made.samples(7, [{"prompt": "p"}])
    made.ended(result())
    told = [("started", info), ("phase", 7, "update"), ("ranks", 7, "update", 1, 2), ("metrics", 7, {"a": 1.0}),
            ("samples", 7, [{"prompt": "p"}]), ("ended", result())]  # fmt: skip
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


def behind(little: Little) -> Any:
    return little.module("acme_notes.work")


def test_a_background_tracker_is_told_everything_in_order(tracking, little: Little) -> None:
    """While it is busy the others are served; what it gets is what was so when it was told."""
    made, notes = tracking("behind", "notes")
    work, numbers, row = behind(little), {"a": 1.0}, {"prompt": "p"}
    for step in range(1, 4):
        made.progress.step = step
        for phase in ("generate", "update"):
            made.phase(phase)
            made.ranks(phase, 1, 2)
            made.ranks(phase, 2, 2)
        made.samples(step, [row])
        made.metrics(step, numbers)
        numbers["a"] += 1
        row["prompt"] += "p"
    assert {name for name, *_ in notes} == {"notes"}
    work.GATE.set()
    made.ended(result())
    got = [call for name, *call in notes if name == "behind"]
    assert got[0] == ["phase", 1, "generate"]  # the call under way
    assert got[1:] == [
        *(
            ["phase", 1, "update"],
            ["ranks", 1, "update", 2, 2],
            ["samples", 1, [{"prompt": "p"}]],
            ["metrics", 1, {"a": 1.0}],
        ),
        *(
            ["phase", 2, "update"],
            ["ranks", 2, "update", 2, 2],
            ["samples", 2, [{"prompt": "pp"}]],
            ["metrics", 2, {"a": 2.0}],
        ),
        *(
            ["phase", 3, "update"],
            ["ranks", 3, "update", 2, 2],
            ["samples", 3, [{"prompt": "ppp"}]],
            ["metrics", 3, {"a": 3.0}],
        ),
        ["ended", result()],
    ]
    [thread] = work.THREADS
    assert thread.daemon and thread is not threading.main_thread()


def test_a_background_tracker_that_raises_is_reported_once(tracking, little: Little, capsys) -> None:
    made, notes = tracking("fragile-behind", "notes")
    behind(little).GATE.set()
    made.phase("update")
    for step in (1, 2):
        made.metrics(step, {})
    made.ended(result())
    assert [call for name, call, *_ in notes if name == "fragile-behind"] == ["phase"]
    assert [call for name, call, *_ in notes if name == "notes"] == ["phase", "metrics", "metrics", "ended"]
    said = capsys.readouterr().err.splitlines()
    assert said == ["warning: tracker 'fragile-behind' raised SystemExit: no room left; it is left out from here on"]


def test_a_hanging_tracker_is_left_behind(tracking, little: Little, monkeypatch, capsys) -> None:
    """It is waited for as long as agreed; a growing queue is said once; nothing is delivered afterwards."""
    monkeypatch.setattr("drivetrain.driver.tracking.DRAIN_S", 0.1)
    made, notes = tracking("behind", "notes")
    for step in range(1500):
        made.phase("generate")
        made.phase("update")
        made.metrics(step, {})
    made.ended(result())
    assert [call for name, call, *_ in notes if name == "notes"][-1] == "ended"
    growing, left = capsys.readouterr().err.splitlines()
    assert growing == "warning: tracker 'behind' is 1000 calls behind; what waits is kept in memory"
    # of each step a phase and metrics, the phase that it hangs in, and the end
    assert left == "warning: tracker 'behind' was left with 3002 undelivered calls; it had 0.1 s after the run"
    [thread] = [thread for thread in threading.enumerate() if thread.name == "tracker behind"]
    behind(little).GATE.set()
    thread.join()
    assert [call for name, call, *_ in notes if name == "behind"] == ["phase"]


def test_what_fails_after_it_was_left_behind_is_not_reported(tracking, little: Little, monkeypatch, capsys) -> None:
    monkeypatch.setattr("drivetrain.driver.tracking.DRAIN_S", 0.1)
    made, _ = tracking("fragile-behind")
    made.metrics(1, {})
    made.ended(result())
    [thread] = [thread for thread in threading.enumerate() if thread.name == "tracker fragile-behind"]
    behind(little).GATE.set()
    thread.join()
    [said] = capsys.readouterr().err.splitlines()
    assert "was left with 2 undelivered calls" in said


def test_a_hanging_tracker_does_not_keep_the_process(tmp_path: Path) -> None:
    code = """
import sys, threading
from pathlib import Path
from types import SimpleNamespace
from drivetrain.contracts.tracker import RunResult, Tracker
from drivetrain.driver import tracking

class Hanging(Tracker):
    background = True
    def metrics(self, step, metrics):
        threading.Event().wait()

tracking.DRAIN_S = 0.1
tracking.resolve = lambda hook, name: Hanging
made = tracking.Tracking(SimpleNamespace(trackers=[SimpleNamespace(name="hanging")]))
made.metrics(1, {})
made.ended(RunResult(status="finished", steps_done=1, steps_planned=1, run_dir=Path("r"), last_metrics={}))
print("over")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "over\n"
    assert done.stderr == "warning: tracker 'hanging' was left with 2 undelivered calls; it had 0.1 s after the run\n"


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
