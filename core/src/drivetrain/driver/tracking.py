"""Trackers and observers, called so that none of them can stop a run."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from drivetrain.background import start_daemon
from drivetrain.config import RunConfig
from drivetrain.contracts.observers import CheckpointSaved, RunEnded, RunFailed, RunStarted, StepEnded
from drivetrain.contracts.tracker import RunInfo, RunResult, Tracker
from drivetrain.driver.progress import Progress
from drivetrain.seam.loading import UNUSABLE
from drivetrain.seam.registry import get_registry, resolve

MANY_CALLS = 1000
#: calls that wait, and that a later one takes the place of
OUTDATES = {"phase": ("phase", "ranks"), "ranks": ("ranks",)}
#: for all background trackers together, after the run
DRAIN_S = 60.0


class Tracking:
    """Tells the config's trackers, and the installed observers, what happens."""

    def __init__(self, run: RunConfig) -> None:
        self.progress = Progress()
        self._told = [_tell(section.name, resolve("trackers", section.name)(section)) for section in run.trackers]

    def started(self, info: RunInfo) -> None:
        self._each("started", info)
        self._observe("run_started", RunStarted(**vars(info)))

    def phase(self, phase: str) -> None:
        self._each("phase", self.progress.step, phase)

    def ranks(self, phase: str, done: int, asked: int) -> None:
        self._each("ranks", self.progress.step, phase, done, asked)

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self._each("metrics", step, dict(metrics))

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self._each("samples", step, [dict(row) for row in rows])

    def step_ended(self, event: StepEnded) -> None:
        self._observe("step_ended", event)

    def checkpoint_saved(self, event: CheckpointSaved) -> None:
        self._observe("checkpoint_saved", event)

    def warn(self, text: str) -> None:
        _complain(f"step {self.progress.step}: {text}")

    def ended(self, result: RunResult) -> None:
        self._each("ended", result)
        deadline = time.monotonic() + DRAIN_S
        for told in self._told:
            told.drain(deadline)
        if result.status == "failed":
            self._observe("run_failed", RunFailed(**vars(result)))
        else:
            self._observe("run_ended", RunEnded(**vars(result)))

    def _each(self, method: str, *args: Any) -> None:
        for told in self._told:
            told(method, *args)

    def _observe(self, observer: str, event: Any) -> None:
        for complaint in get_registry().notify(observer, event):
            _complain(complaint)


class _Direct:
    """Calls a tracker at once."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self._name, self._tracker, self._left_out = name, tracker, False

    def __call__(self, method: str, *args: Any) -> None:
        if self._left_out:
            return
        try:
            getattr(self._tracker, method)(*args)
        except UNUSABLE as cause:
            if not self._left_out:  # it may have been left behind meanwhile
                _complain(f"tracker {self._name!r} raised {type(cause).__name__}: {cause}; it is left out from here on")
            self._left_out = True

    def drain(self, deadline: float) -> None:
        """Wait for calls under way."""


class _Background(_Direct):
    """Calls a tracker in a thread of its own, which does not keep the process alive."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        super().__init__(name, tracker)
        self._calls: deque[tuple[Any, ...]] = deque()  # the first is under way
        self._changed = threading.Condition()
        self._warned = False
        start_daemon(self._work, f"tracker {name}")

    def __call__(self, *call: Any) -> None:
        with self._changed:
            while len(self._calls) > 1 and self._calls[-1][0] in OUTDATES.get(call[0], ()):
                self._calls.pop()
            self._calls.append(call)
            self._changed.notify_all()
            warn = len(self._calls) == MANY_CALLS and not self._warned
            self._warned |= warn
        if warn:
            _complain(f"tracker {self._name!r} is {MANY_CALLS} calls behind; what waits is kept in memory")

    def drain(self, deadline: float) -> None:
        with self._changed:
            if self._changed.wait_for(lambda: not self._calls, deadline - time.monotonic()):
                return
            left, self._left_out = len(self._calls), True
        _complain(f"tracker {self._name!r} was left with {left} undelivered calls; it had {DRAIN_S:g} s after the run")

    def _work(self) -> None:
        call: tuple[Any, ...] = ("",)
        while call[0] != "ended":
            with self._changed:
                self._changed.wait_for(lambda: self._calls)
                call = self._calls[0]
            super().__call__(*call)
            with self._changed:
                self._calls.popleft()
                self._changed.notify_all()


def _tell(name: str, tracker: Tracker) -> _Direct:
    return (_Background if tracker.background else _Direct)(name, tracker)


def _complain(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)
