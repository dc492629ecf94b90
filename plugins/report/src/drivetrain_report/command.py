"""The command ``drivetrain report``."""

from __future__ import annotations

from pathlib import Path

from drivetrain_report.report import render_report


def report(run_dir: Path, samples: int = 12) -> None:
    """Write report.html of a run folder, from what the run has logged so far."""
    print(render_report(run_dir, samples=samples))
