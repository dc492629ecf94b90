"""The tracker ``report``, and the page of a run folder."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from drivetrain import PluginConfig, RunInfo, RunResult, Tracker, UserError
from drivetrain_report.facts import config_values, planned_steps
from drivetrain_report.history import METRICS_FILE, History
from drivetrain_report.outcome import Outcome
from drivetrain_report.page import Run, page
from drivetrain_report.writing import write_aside

REPORT_FILE = "report.html"
CONFIG_FILE = "config.yaml"


class ReportTracker(Tracker):
    """Writes ``report.html`` into the run folder when the run ends, however it ends."""

    def __init__(self, config: PluginConfig) -> None:
        super().__init__(config)
        self._began = time.monotonic()
        self._seen = History()
        self._outcome = Outcome()
        self._config: dict[str, Any] = {}

    def started(self, info: RunInfo) -> None:
        self._began = time.monotonic()
        self._config = config_values(info.config)
        self._outcome = Outcome(
            status="running",
            wall_s=_earlier_wall_s(info.run_dir) if info.first_step > 1 else 0.0,
            first_step=info.first_step,
            steps_planned=planned_steps(self._config),
            notes=[str(note) for note in info.notes],
            plan=dict(info.plan),
        )
        self._outcome.write(info.run_dir)

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self._seen.add_metrics(step, metrics)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self._seen.add_samples(step, rows)

    def ended(self, result: RunResult) -> None:
        outcome = replace(
            self._outcome,
            status=result.status,
            error=result.error,
            steps_done=result.steps_done,
            steps_planned=result.steps_planned,
            wall_s=self._outcome.wall_s + time.monotonic() - self._began,
            ended_at=datetime.now().strftime("%Y-%m-%d %H:%M"),
        )
        outcome.write(result.run_dir)
        history = History.read(result.run_dir)
        history.rewind(outcome.first_step - 1)
        history.extend(self._seen)
        _write(result.run_dir, history, outcome, self._config, getattr(self.config, "samples", 12))


def render_report(run_dir: Path, *, samples: int = 12) -> Path:
    """Write ``report.html`` from what a run folder holds.

    Args:
        run_dir: the run folder; it needs a ``metrics.jsonl``.
        samples: prompts whose completions are shown.

    Returns:
        path of the page.

    Raises:
        UserError: the folder has no metrics.
    """
    run_dir = Path(run_dir)
    if not (run_dir / METRICS_FILE).is_file():
        raise UserError(f"no {METRICS_FILE} to report on", where=str(run_dir),
                        mend="name a run folder whose config has {name: jsonl} among its trackers")  # fmt: skip
    return _write(run_dir, History.read(run_dir), Outcome.read(run_dir), {}, samples)


def _write(run_dir: Path, history: History, outcome: Outcome, config: dict[str, Any], samples: int) -> Path:
    config_text, written = _config_file(run_dir)
    config = config or written
    if not config_text and config:
        config_text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
    run = Run(folder=run_dir.resolve().name, history=history, outcome=outcome, config=config, config_text=config_text,
              samples=samples)  # fmt: skip
    path = run_dir / REPORT_FILE
    write_aside(path, page(run))
    return path


def _config_file(run_dir: Path) -> tuple[str, dict[str, Any]]:
    try:
        text = (run_dir / CONFIG_FILE).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "", {}
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError:
        return text, {}
    return text, values if isinstance(values, dict) else {}


def _earlier_wall_s(run_dir: Path) -> float:
    """Wall time of earlier sessions; for one that was killed, the time of its logged steps."""
    outcome = Outcome.read(run_dir)
    if outcome.status != "running":
        return outcome.wall_s
    return outcome.wall_s + History.read(run_dir).spent_s(since=outcome.first_step)
