"""``drivetrain train``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from drivetrain.config.resolve import Resolved, load_config
from drivetrain.errors import DrivetrainError, UserError
from drivetrain.seam.registry import get_registry


def train(path: Path, overrides: Sequence[str], *, resume: str | None, overwrite: bool) -> int:
    """Run a config to its end; returns the exit code."""
    resolved = load_config(path, overrides, get_registry())  # everything wrong with it is said before torch loads
    if resume is not None and overwrite:
        raise UserError("--resume continues a run and --overwrite moves it aside", where="command line",
                        mend="give one of them")  # fmt: skip
    from drivetrain.driver import run_folder

    with run_folder.locked(resolved.run.trainer.run_dir.absolute()):
        return _train(resolved, resume=resume, overwrite=overwrite)


def _train(resolved: Resolved, *, resume: str | None, overwrite: bool) -> int:
    run = resolved.run
    from drivetrain.contracts.tracker import RunResult
    from drivetrain.driver import checkpoints, run_folder
    from drivetrain.driver.session import Session
    from drivetrain.driver.stopping import StopRequest
    from drivetrain.driver.tracking import Tracking
    from drivetrain.driver.trainer import Trainer

    run_dir = run.trainer.run_dir.absolute()
    unusable = get_registry().unusable()
    notes = [f"not loadable: {row.distribution} {row.version} {row.reason}" for row in unusable]
    notes += resolved.notes
    found = None
    if resume is not None:
        found = (
            checkpoints.newest(run_dir, notes.append)
            if resume == "auto"
            else checkpoints.find(Path(resume), notes.append)
        )
        notes.append(f"resuming from {found}" if found else f"no checkpoint in {run_dir}; starting at step 1")
    notes += run_folder.prepare(run_dir, resuming=resume is not None, overwrite=overwrite)
    tracking = Tracking(run)
    try:
        with (
            StopRequest() as request,
            Session(run, announce=tracking.phase, ranks=tracking.ranks, reads=(found,) if found else ()) as session,
        ):
            tracking.progress = session.progress
            trainer = Trainer(session, tracking, run_dir, [*notes, session.placement])
            if found:
                trainer.resume(found)
            run_folder.write_config(run_dir, run)
            result = trainer.train(stop=lambda: request.requested)
    except BaseException as error:
        message = str(error) if isinstance(error, DrivetrainError) else f"{type(error).__name__}: {error}"
        status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        tracking.ended(RunResult(status=status, steps_done=max(0, tracking.progress.step - 1), error=message,
                                 steps_planned=run.trainer.steps, run_dir=run_dir, last_metrics={}))  # fmt: skip
        raise
    tracking.ended(result)
    if result.status == "interrupted":
        print(f"stopped after step {result.steps_done}; go on with\n"
              f"  drivetrain train {run_dir / run_folder.CONFIG_FILE} --resume auto", file=sys.stderr)  # fmt: skip
        return 130
    return 0
