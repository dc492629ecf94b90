"""Where a run stands, as the console shows it."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from drivetrain import RunInfo
from drivetrain_report.catalogue import PHASES
from drivetrain_report.facts import config_values, planned_steps
from drivetrain_report.history import History

PACE_STEPS = 50


class Progress:
    """Collects what happens in a run and answers how far it is.

    Attributes:
        history: everything logged; on a resumed run also what the run folder holds from earlier.
        steps_planned: steps of the whole run, if the config says.
        steps_done: the last step that is complete.
        phase: name of the current phase, with the time it began.
        ranks: how many ranks have answered the call of the current phase, and of how many; None while none has.
        phase_s: seconds spent in each phase in this session.
        lock: held while something changes, and by the thread that draws while it looks.
    """

    def __init__(self, info: RunInfo, clock: Callable[[], float] = time.monotonic) -> None:
        self.info = info
        self.lock = threading.RLock()
        self.config: dict[str, Any] = config_values(info.config)
        self.clock = clock
        self.began = clock()
        self.history = History.read(info.run_dir) if info.first_step > 1 else History()
        self.history.rewind(info.first_step - 1)
        self.steps_planned = planned_steps(self.config)
        self.steps_done = info.first_step - 1
        self.phase: tuple[str, float] | None = None
        self.ranks: tuple[int, int] | None = None
        self.phase_s: dict[str, float] = {}
        self._marks: deque[tuple[int, float]] = deque([(self.steps_done, self.began)], maxlen=PACE_STEPS)

    def enter(self, step: int, phase: str) -> None:
        """The step has entered a phase."""
        with self.lock:
            self.phase, self.ranks = (phase, self.clock()), None
            self._reach(step - 1)

    def answer(self, phase: str, done: int, asked: int) -> None:
        """Some ranks have answered a call; one that all have answered is over."""
        with self.lock:
            if self.phase and self.phase[0] == phase:
                self.ranks = (done, asked) if done < asked else None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step has logged its metrics."""
        with self.lock:
            self.history.add_metrics(step, metrics)
            self._reach(step)
            for phase in PHASES:
                spent = metrics.get(f"time/{phase}_s")
                if spent is not None and math.isfinite(spent) and spent > 0:
                    self.phase_s[phase] = self.phase_s.get(phase, 0.0) + spent

    def last(self, name: str) -> float | None:
        """The latest value of a metric."""
        series = self.history.series(name)
        return series[-1][1] if series else None

    @property
    def elapsed_s(self) -> float:
        """Time since the start of this session."""
        return self.clock() - self.began

    @property
    def remaining_s(self) -> float | None:
        """Time to the end at the pace of the last steps; None before the first one is complete."""
        (first, then), (last, now) = self._marks[0], self._marks[-1]
        if self.steps_planned is None or last == first:
            return None
        pace = (now - then) / (last - first)
        return max(0.0, pace * (self.steps_planned - last) - (self.clock() - now))

    def _reach(self, step: int) -> None:
        if step > self.steps_done:
            self.steps_done = step
            self._marks.append((step, self.clock()))
