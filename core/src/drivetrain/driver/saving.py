"""When the checkpoints of a run are written: within the step, or beside the steps that follow."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from drivetrain.background import in_background
from drivetrain.contracts.observers import CheckpointSaved
from drivetrain.driver import checkpoints
from drivetrain.driver.session import Session
from drivetrain.driver.tracking import Tracking
from drivetrain.errors import CheckpointError, DrivetrainError
from drivetrain.protocol import DataProto


class Saving:
    """Saves checkpoints, one at a time; leaving its context waits for the one that is being written.

    With ``trainer.save_in_background`` workers copy their shards within the step. They write the copies, and then a
    thread here computes checksums and puts the checkpoint in its place, while training goes on.
    """

    def __init__(self, session: Session, tracking: Tracking, run_dir: Path) -> None:
        self._session, self._tracking, self._run_dir = session, tracking, run_dir
        self._config = session.run.trainer
        self._step: int | None = None  # whose checkpoint is being written
        self._committed: Future[Path] | None = None

    def save(self, step: int, state: Mapping[str, Any], batches: Mapping[str, DataProto]) -> None:
        """Save a checkpoint, or begin to; the one before is in its place by then. See :func:`checkpoints.begin`."""
        self.advance(wait=True)
        background = self._config.save_in_background
        write = partial(self._session.save_models, background=background)
        checkpoints.begin(self._run_dir, step, state, write, batches)
        if background:
            self._step = step
        else:
            self._tell(step, self._commit(step))

    def advance(self, *, wait: bool = False) -> None:
        """Get on with the checkpoint that is being written, to its end if ``wait``.

        Raises:
            CheckpointError: it could not be written.
        """
        step, self._step = self._step, None
        if step is None:
            return
        try:
            if self._committed is None and self._session.models_written(wait=wait):
                self._committed = in_background(partial(self._commit, step), "checkpoint")
            if self._committed is None or not (wait or self._committed.done()):
                self._step = step
                return
            folder = self._committed.result()
        except DrivetrainError:
            raise
        except Exception as error:
            raise CheckpointError(f"the checkpoint of step {step} could not be written: {error}",
                                  where=str(checkpoints.folder_of(self._run_dir, step)),
                                  mend="see to the disk, and go on from the one before: --resume auto",
                                  ) from error  # fmt: skip
        self._committed = None
        self._tell(step, folder)

    def _commit(self, step: int) -> Path:
        folder = checkpoints.commit(self._run_dir, step)
        checkpoints.keep_last(self._run_dir, self._config.keep_checkpoints, step,
                              highest=self._config.best_is == "highest")  # fmt: skip
        return folder

    def _tell(self, step: int, folder: Path) -> None:
        self._tracking.checkpoint_saved(CheckpointSaved(step=step, run_dir=self._run_dir, folder=folder))

    def __enter__(self) -> Saving:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.advance(wait=True)
        elif isinstance(error, Exception) and (step := self._step) is not None:  # what was copied before it is sound
            try:
                self.advance(wait=True)
            except Exception as lost:
                first, *_ = str(lost).splitlines() or [type(lost).__name__]
                self._tracking.warn(f"the checkpoint of step {step}, which was being written, is lost: {first}")
