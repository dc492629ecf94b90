"""Trackers and observers, called so that none of them can stop a run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from drivetrain.config import RunConfig
from drivetrain.contracts.observers import CheckpointSaved, RunEnded, RunFailed, RunStarted, StepEnded
from drivetrain.contracts.tracker import RunInfo, RunResult, Tracker
from drivetrain.driver.progress import Progress
from drivetrain.seam.registry import get_registry, resolve


class Tracking:
    """Tells the config's trackers, and the installed observers, what happens."""

    def __init__(self, run: RunConfig) -> None:
        self.progress = Progress()
        self._trackers: dict[str, Tracker] = {
            f"{index}:{section.name}": resolve("trackers", section.name)(section)
            for index, section in enumerate(run.trackers)
        }

    def started(self, info: RunInfo) -> None:
        self._each(lambda tracker: tracker.started(info))
        self._observe("run_started", RunStarted(**vars(info)))

    def phase(self, phase: str) -> None:
        self._each(lambda tracker: tracker.phase(self.progress.step, phase))

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self._each(lambda tracker: tracker.metrics(step, metrics))

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self._each(lambda tracker: tracker.samples(step, rows))

    def step_ended(self, event: StepEnded) -> None:
        self._observe("step_ended", event)

    def checkpoint_saved(self, event: CheckpointSaved) -> None:
        self._observe("checkpoint_saved", event)

    def warn(self, text: str) -> None:
        _complain(f"step {self.progress.step}: {text}")

    def ended(self, result: RunResult) -> None:
        self._each(lambda tracker: tracker.ended(result))
        if result.status == "failed":
            self._observe("run_failed", RunFailed(**vars(result)))
        else:
            self._observe("run_ended", RunEnded(**vars(result)))

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                call(tracker)
            except Exception as cause:
                del self._trackers[name]
                kind = name.partition(":")[2]
                _complain(f"tracker {kind!r} raised {type(cause).__name__}: {cause}; it is left out from here on")

    def _observe(self, observer: str, event: Any) -> None:
        for complaint in get_registry().notify(observer, event):
            _complain(complaint)


def _complain(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)
