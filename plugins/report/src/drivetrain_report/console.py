"""The tracker ``console``."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from drivetrain import PluginConfig, RunInfo, RunResult, Tracker
from drivetrain_report.closing import closing_lines, easiest_prompt, shown_path
from drivetrain_report.facts import look_up, plan_line, title
from drivetrain_report.lines import start_line, step_line
from drivetrain_report.live import LiveView
from drivetrain_report.numbers import plain
from drivetrain_report.progress import Progress

REFRESH_PER_S = 4


class ConsoleTracker(Tracker):
    """Shows a run in the terminal, or prints a line a logged step where there is none."""

    def __init__(self, config: PluginConfig, console: Console | None = None) -> None:
        """Prepare.

        Args:
            config: the tracker's section.
            console: where to draw the live view, to draw it elsewhere than on standard output.
        """
        super().__init__(config)
        mode = getattr(config, "mode", "auto")
        self._live_wanted = mode == "live" or (mode == "auto" and (console is not None or _is_terminal()))
        self._console = console or Console(highlight=False)
        self._progress: Progress | None = None
        self._live: Live | None = None
        self._prompts: list[str] = []

    def started(self, info: RunInfo) -> None:
        self._progress = Progress(info)
        if not self._live_wanted:
            if line := start_line(info):
                _say(line)
            return
        _introduce(self._console, info, self._progress)
        self._live = Live(LiveView(self._progress), console=self._console, refresh_per_second=REFRESH_PER_S,
                          vertical_overflow="crop")  # fmt: skip
        atexit.register(self._stop)
        self._live.start()

    def phase(self, step: int, phase: str) -> None:
        if self._progress:
            self._progress.enter(step, phase)

    def ranks(self, step: int, phase: str, done: int, asked: int) -> None:
        if self._progress:
            self._progress.answer(phase, done, asked)

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._progress is None:
            return
        self._progress.log(step, metrics)
        if self._live is None:
            _say(step_line(step, self._progress.steps_planned, metrics))

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        if not self._prompts:
            self._prompts = [row["prompt"] for row in rows if isinstance(row.get("prompt"), str)]

    def ended(self, result: RunResult) -> None:
        progress = self._progress
        if progress is not None:
            progress.phase = None
            progress.steps_done = result.steps_done
        self._stop()
        rows = closing_lines(
            result,
            accuracies=[value for _, value in progress.history.finite("eval/accuracy")] if progress else [],
            wall_s=progress.elapsed_s if progress else 0.0,
            prompt=easiest_prompt(self._prompts),
            report=(result.run_dir / "report.html").exists() or (progress is not None and _reports(progress.config)),
        )
        width = max(len(label) for label, _ in rows)
        for number, (label, text) in enumerate(rows):
            if self._live is None:
                _say(f"{label.ljust(width)}  {text}")
            else:
                style = "bold green" if result.status == "finished" else "bold yellow"
                shown = _encodable(text, self._console.encoding)
                line = Text.assemble((label.ljust(width), style if number == 0 else "bright_black"), "  ", shown)
                self._console.print(line, soft_wrap=True)

    def _stop(self) -> None:
        atexit.unregister(self._stop)
        if self._live is not None:
            self._live.stop()


def _introduce(console: Console, info: RunInfo, progress: Progress) -> None:
    rows = [("plan", plan_line(info.plan))] if info.plan else []
    rows += [("note", plain(note)) for note in info.notes]
    name, folder = (_encodable(t, console.encoding) for t in (plain(title(progress.config)), shown_path(info.run_dir)))
    console.print(Text.assemble((name, "bold"), ("  " + folder, "bright_black")), soft_wrap=True)
    for label, text in rows:
        console.print(Text.assemble((f"{label}  ", "bright_black"), _encodable(text, console.encoding)))


def _reports(config: Mapping[str, Any]) -> bool:
    trackers = look_up(config, "trackers")
    return any(isinstance(t, Mapping) and t.get("name") == "report" for t in trackers or ())


def _is_terminal() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown")


def _say(line: str) -> None:
    print(_encodable(line, getattr(sys.stdout, "encoding", None) or "utf-8"), flush=True)


def _encodable(text: str, encoding: str) -> str:
    return text.encode(encoding, "replace").decode(encoding)
