"""What a run has logged, from its folder and from memory."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from drivetrain_report.catalogue import BESIDES_STEP
from drivetrain_report.numbers import as_float

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"


class History:
    """Metrics and evaluation samples of a run by step.

    A run that died after its last checkpoint and was resumed logs some steps twice. A step that goes back therefore
    discards what was logged for later ones; the same step again is merged.

    Attributes:
        rows: step to metric name to value, in the order of steps.
        samples: step to evaluation samples.
        unreadable: lines of the files that are no JSON objects with a step.
    """

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, float]] = {}
        self.samples: dict[int, list[Mapping[str, Any]]] = {}
        self.unreadable = 0

    @classmethod
    def read(cls, run_dir: Path) -> History:
        """Read ``metrics.jsonl`` and ``samples.jsonl``, as far as they exist."""
        history = cls()
        for step, row in history._lines(run_dir / METRICS_FILE):
            history.add_metrics(step, row)
        for step, row in history._lines(run_dir / SAMPLES_FILE):
            history.add_samples(step, [row])
        return history

    def add_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add a logged step; values that are no numbers are left out."""
        _discard_after(self.rows, step)
        numbers = {name: as_float(value) for name, value in metrics.items() if name != "step"}
        self.rows.setdefault(step, {}).update({name: value for name, value in numbers.items() if value is not None})

    def add_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add evaluation samples of a step."""
        _discard_after(self.samples, step)
        self.samples.setdefault(step, []).extend(rows)

    def rewind(self, step: int) -> None:
        """Forget everything after a step."""
        _discard_after(self.rows, step)
        _discard_after(self.samples, step)

    def extend(self, other: History) -> None:
        """Add what another one holds; its samples replace those of the same step."""
        for step, row in other.rows.items():
            self.add_metrics(step, row)
        for step, samples in other.samples.items():
            _discard_after(self.samples, step)
            self.samples[step] = list(samples)

    @property
    def last_step(self) -> int:
        """The last step with metrics, 0 if there is none."""
        return max(self.rows, default=0)

    def names(self) -> list[str]:
        """Names of all metrics, in the order of their first appearance."""
        return list(dict.fromkeys(name for row in self.rows.values() for name in row))

    def series(self, name: str) -> list[tuple[int, float]]:
        """``(step, value)`` of a metric, values that are not finite included.

        Safe to call while another thread adds steps: it works on a copy of the listing.
        """
        return [(step, row[name]) for step, row in list(self.rows.items()) if name in row]

    def finite(self, name: str) -> list[tuple[int, float]]:
        """``(step, value)`` of a metric where it is finite."""
        return [(step, value) for step, value in self.series(name) if math.isfinite(value)]

    def spent_s(self, since: int = 0) -> float:
        """Time of the logged steps from one on, with their evaluations and checkpoints."""
        names = ("time/step_s", *(f"time/{phase}_s" for phase in BESIDES_STEP))
        return sum(value for name in names for step, value in self.finite(name) if step >= since)

    def _lines(self, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
        if not path.is_file():
            return
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                    step = int(row["step"])
                except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
                    self.unreadable += 1
                    continue
                yield step, row


def _discard_after(by_step: dict[int, Any], step: int) -> None:
    if by_step and next(reversed(by_step)) > step:
        for later in [s for s in by_step if s > step]:
            del by_step[later]
