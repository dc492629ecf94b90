"""The summary at the end of a run."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from drivetrain import RunResult
from drivetrain_report.numbers import duration, score


def closing_lines(
    result: RunResult, *, accuracies: list[float], wall_s: float, prompt: str | None, report: bool
) -> list[tuple[str, str]]:
    """Labelled lines of the summary.

    Args:
        result: how the run ended.
        accuracies: accuracy of every evaluation.
        wall_s: time since the run was started.
        prompt: an evaluation prompt, if one was seen.
        report: whether the page exists or is about to be written.
    """
    folder = shown_path(result.run_dir)
    rows = [(result.status, f"{result.steps_done} of {result.steps_planned} steps in {duration(wall_s)}")]
    if accuracies:
        rows.append(("accuracy", " -> ".join(score(a) for a in dict.fromkeys((accuracies[0], accuracies[-1])))))
    rows.append(("run folder", folder))
    if report:
        rows.append(("report", os.path.join(folder, "report.html")))
    if result.status == "finished" or _has_checkpoint(result.run_dir):
        asked = "..." if prompt is None else prompt
        rows.append(("try it", f"drivetrain generate {shlex.quote(folder)} --prompt {shell_quote(asked)}"))
    return rows


def shown_path(path: Path) -> str:
    """The path from the current folder if it lies below, else in full."""
    try:
        relative = path.resolve().relative_to(Path.cwd())
    except (ValueError, OSError):
        return str(path)
    return str(relative)


def shell_quote(text: str) -> str:
    """Quote for a shell on one line, in double quotes where they are enough."""
    if not text.isprintable():
        return f"$'{''.join(map(_ansi_c, text))}'"
    if any(c in text for c in '"$`\\!'):
        return shlex.quote(text)
    return f'"{text}"'


def _ansi_c(c: str) -> str:
    known = {"\n": r"\n", "\t": r"\t", "\r": r"\r", "\\": r"\\", "'": r"\'"}
    return known.get(c) or (c if c.isprintable() else f"\\U{ord(c):08x}")


def easiest_prompt(prompts: list[str]) -> str | None:
    """The first prompt that reads well on a command line, else the shortest."""
    for prompt in prompts:
        if prompt.isprintable() and 0 < len(prompt) <= 100:
            return prompt
    return min((prompt for prompt in prompts if prompt.strip()), key=len, default=None)


def _has_checkpoint(run_dir: Path) -> bool:
    folder = run_dir / "checkpoints"
    return folder.is_dir() and any(folder.iterdir())
