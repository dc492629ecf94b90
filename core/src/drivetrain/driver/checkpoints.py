"""Checkpoints of a run: written aside, renamed when complete, and found again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from drivetrain.errors import CheckpointError, UserError

STATE_FILE = "driver.json"


def folder_of(run_dir: Path, step: int) -> Path:
    """Where the checkpoint of a step stands."""
    return run_dir / "checkpoints" / f"step-{step:06d}"


def save(run_dir: Path, step: int, state: Mapping[str, Any], write_models: Callable[[Path], None]) -> Path:
    """Write a checkpoint.

    Args:
        state: of the driver, as JSON values.
        write_models: writes the models' state into the folder it is given.

    Returns:
        the folder, which appears only when everything in it is complete.
    """
    final = folder_of(run_dir, step)
    aside = final.with_name(f".{final.name}.part")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    write_models(aside)
    (aside / STATE_FILE).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
    _remove(final)
    aside.rename(final)
    return final


def complete(run_dir: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    return sorted(p.parent for p in (run_dir / "checkpoints").glob(f"step-*/{STATE_FILE}"))


def keep_last(run_dir: Path, count: int, step: int) -> None:
    """Remove all checkpoints but the newest ``count`` up to ``step``; a run that went back takes later steps again."""
    found = complete(run_dir)
    kept = [folder for folder in found if folder.name <= folder_of(run_dir, step).name][-count:]
    for folder in found:
        if folder not in kept:
            _remove(folder)


def _remove(folder: Path) -> None:
    """Remove a checkpoint, hidden first: one that is removed in part is never found."""
    if folder.exists():
        aside = folder.with_name(f".{folder.name}.old")
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)
        shutil.rmtree(aside)


def find(where: Path) -> Path:
    """The checkpoint that a path means: a checkpoint's folder, or a run's folder (its newest).

    Raises:
        UserError: there is none.
    """
    if (where / STATE_FILE).is_file():
        return where
    found = complete(where)
    if not found:
        raise UserError("no complete checkpoint", where=str(where), mend="give a run folder or one of its checkpoints")
    return found[-1]


def read_state(folder: Path) -> dict[str, Any]:
    """The driver's state of a checkpoint."""
    try:
        state: dict[str, Any] = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
        if not isinstance(state, dict):
            raise ValueError("it holds no JSON object")
    except (OSError, ValueError) as cause:
        raise CheckpointError("the checkpoint cannot be read", where=str(folder / STATE_FILE)) from cause
    return state
