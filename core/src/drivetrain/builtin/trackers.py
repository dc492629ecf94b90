"""The built-in trackers: ``jsonl`` keeps the numbers of a run, ``lines`` prints them."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from drivetrain.contracts.tracker import RunInfo, RunResult, Tracker

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"


class JSONLTracker(Tracker):
    """Writes ``metrics.jsonl`` and ``samples.jsonl`` into the run folder, one object a line."""

    _run_dir: Path | None = None

    def started(self, info: RunInfo) -> None:
        self._run_dir = info.run_dir
        for name in (METRICS_FILE, SAMPLES_FILE):
            _keep_steps_before(info.run_dir / name, info.first_step)

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        # JSON has no NaN; null says that there is no number
        finite = {k: v if math.isfinite(v) else None for k, v in metrics.items()}
        self._append(METRICS_FILE, [{"step": step, **finite}])

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self._append(SAMPLES_FILE, [{"step": step, **row} for row in rows])

    def _append(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        assert self._run_dir is not None
        with (self._run_dir / name).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _keep_steps_before(path: Path, first_step: int) -> None:
    """Drop the lines of steps that a resumed run is about to take again; step 0 belongs to the first of them."""
    if not path.exists():
        return
    *lines, _ = path.read_text(encoding="utf-8").split("\n")  # what follows the last newline was cut off
    kept = [line for line in lines if first_step > 1 and json.loads(line)["step"] < first_step]
    aside = path.with_suffix(".tmp")
    aside.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
    aside.replace(path)


class LinesTracker(Tracker):
    """Prints a line at the start, one a logged step, and one at the end."""

    _shown = (
        ("reward", "train/reward", "{:.3f}"), ("accuracy", "eval/accuracy", "{:.3f}"), ("loss", "train/loss", "{:.4f}"),
        ("kl", "train/kl", "{:.4f}"), ("entropy", "train/entropy", "{:.3f}"),
        ("tokens", "train/response_tokens", "{:.1f}"), ("tok/s", "throughput/tokens_per_s", "{:,.0f}"),
        ("s", "time/step_s", "{:.2f}"),
    )  # fmt: skip
    _planned = 0

    @property
    def _out(self) -> TextIO:
        return sys.stdout

    def started(self, info: RunInfo) -> None:
        self._planned = info.config.trainer.steps
        for note in info.notes:
            print(note, file=self._out)
        print("  ".join(f"{name} {value}" for name, value in info.plan.items()), file=self._out, flush=True)

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        words = [f"{label} {form.format(metrics[key])}" for label, key, form in self._shown if key in metrics]
        if words:
            print(f"step {step}/{self._planned}  " + "  ".join(words), file=self._out, flush=True)

    def ended(self, result: RunResult) -> None:
        text = f"{result.status}: {result.steps_done} of {result.steps_planned} steps, {result.run_dir}"
        print(text, file=self._out, flush=True)
