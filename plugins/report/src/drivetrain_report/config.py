"""Config of the trackers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from drivetrain import PluginConfig


class ConsoleConfig(PluginConfig):
    """An entry ``{name: console}`` of ``trackers``."""

    mode: Literal["auto", "live", "lines"] = Field(
        "auto", description="A live view or plain lines; auto is live when standard output is a terminal."
    )


class ReportConfig(PluginConfig):
    """An entry ``{name: report}`` of ``trackers``."""

    samples: int = Field(12, ge=0, description="Prompts whose completions the page shows.")
