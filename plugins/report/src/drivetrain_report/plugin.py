"""The trackers ``console`` and ``report``, and the command ``report``."""

from __future__ import annotations

from collections.abc import Iterable

from drivetrain import CommandSpec, TrackerSpec, hookimpl


@hookimpl
def drivetrain_trackers() -> Iterable[TrackerSpec]:
    """Offer the console view and the report page."""
    yield TrackerSpec(
        name="console",
        summary="Progress and curves in the terminal; plain lines when there is none.",
        factory="drivetrain_report.console:ConsoleTracker",
        config="drivetrain_report.config:ConsoleConfig",
    )
    yield TrackerSpec(
        name="report",
        summary="A page with curves and completions, report.html in the run folder, at the end of a run.",
        factory="drivetrain_report.report:ReportTracker",
        config="drivetrain_report.config:ReportConfig",
    )


@hookimpl
def drivetrain_commands() -> Iterable[CommandSpec]:
    """Offer the command that writes the page anew."""
    yield CommandSpec(
        name="report",
        summary="Write report.html of a run folder, from what the run has logged.",
        factory="drivetrain_report.command:report",
    )
