"""The contract of receivers of metrics."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from drivetrain.config import PluginConfig, RunConfig


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """A run, as told to trackers and observers when it starts.

    Attributes:
        run_dir: the run folder, absolute.
        config: the resolved config.
        notes: what was decided for the user, one line each (detected hardware, derived roles, dropped keys).
        first_step: number of the first step to come, 1 unless resumed.
        plan: named sizes of a step (prompts, sequences, mini-batches, ...), for display.
    """

    run_dir: Path
    config: RunConfig
    notes: Sequence[str]
    first_step: int
    plan: Mapping[str, int | str]


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """How a run ended.

    Attributes:
        status: ``finished``, ``interrupted`` or ``failed``.
        error: the message of a failure.
    """

    status: str
    steps_done: int
    steps_planned: int
    run_dir: Path
    last_metrics: Mapping[str, float]
    error: str | None = None


class Tracker(ABC):
    """Receives what happens in a run, on the driver. Every method has an empty default.

    A tracker that raises is reported once and left out from then on; it never stops a run.

    Attributes:
        background: whether the methods are called, in order, from a daemon thread that the tracker has to itself, so
            that a slow one costs the step nothing. Of phases that wait in a row, with their ranks, only the last is
            delivered; metrics and samples are kept however many wait, with one warning at 1000 waiting calls. When the
            run is over, all such trackers together have 60 s for what is left; a warning then counts what was not
            delivered.
    """

    background: ClassVar[bool] = False

    def __init__(self, config: PluginConfig) -> None:
        self.config = config

    def started(self, info: RunInfo) -> None:
        """The run is about to take its first step."""

    def phase(self, step: int, phase: str) -> None:
        """The step has entered a phase (``generate``, ``reward``, ``update``, ``evaluate``, ``save``, ...)."""

    def ranks(self, step: int, phase: str, done: int, asked: int) -> None:
        """So many of the ranks that were asked have answered the call under way, if it was more than one."""

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics of a logged step; step 0 is before the first update."""

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Some evaluation samples: ``prompt``, ``response``, ``answer``, ``score``, ``correct``, ``data_source``."""

    def ended(self, result: RunResult) -> None:
        """The run is over; called once, also after a failure."""
