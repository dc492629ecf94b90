"""The tracker ``tensorboard``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from drivetrain import RunInfo, RunResult, Tracker
from drivetrain_trackers.files import first_to_drop
from drivetrain_trackers.rows import flat, table, text

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from drivetrain_trackers.configs import TensorBoardConfig

FOLDER = "tensorboard"


class TensorBoardTracker(Tracker):
    """Writes event files: metrics as scalars, the config and samples as text.

    Events of steps that a resumed run takes again are marked as purged, and TensorBoard hides them.
    """

    background: ClassVar[bool] = True
    config: TensorBoardConfig
    _writer: SummaryWriter

    def started(self, info: RunInfo) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = self.config.dir or info.run_dir / FOLDER
        self._writer = SummaryWriter(str(folder), purge_step=first_to_drop(info.first_step))
        values = [{"key": key, "value": value} for key, value in flat(info.config.model_dump(mode="json"))]
        self._writer.add_text("config", _markdown(table(values)), info.first_step - 1)

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, float(value), step)
        self._writer.flush()

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        if shown := rows[: self.config.samples]:
            self._writer.add_text("eval/samples", _markdown(table(shown)), step)

    def ended(self, result: RunResult) -> None:
        words = result.status if result.error is None else f"{result.status}: {result.error}"
        self._writer.add_text("status", text(words), result.steps_done)
        self._writer.close()


def _markdown(columns: Mapping[str, Sequence[Any]]) -> str:
    """A table, as TensorBoard renders it."""
    lines = [tuple(columns), ("---",) * len(columns), *zip(*columns.values())]
    return "\n".join("| " + " | ".join(_escaped(cell) for cell in line) + " |" for line in lines)


def _escaped(cell: Any) -> str:
    words = "" if cell is None else str(cell)
    return words.replace("|", "\\|").replace("\n", "<br>")
