"""The folder of a run: made anew, moved aside, or continued."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from drivetrain.config import RunConfig
from drivetrain.config.layers import dump_value
from drivetrain.errors import UserError

CONFIG_FILE = "config.yaml"


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Keep other processes out of a run folder; the system lets go when this process ends, however it ends.

    Raises:
        UserError: another process is using it.
    """
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    with run_dir.with_name(f".{run_dir.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as cause:
            raise UserError("the run folder is in use by another process", where=str(run_dir),
                            mend="wait for it, or set another trainer.run_dir") from cause  # fmt: skip
        yield


def prepare(run_dir: Path, *, resuming: bool, overwrite: bool) -> list[str]:
    """Make the folder ready; returns what was done, in words.

    Raises:
        UserError: it holds an earlier run, and nobody said what to do with it.
    """
    notes = []
    if (run_dir / CONFIG_FILE).exists() and not resuming:
        if not overwrite:
            raise UserError("the run folder holds an earlier run", where=str(run_dir), details=[
                ("continue it", "--resume auto"), ("move it aside", "--overwrite"),
                ("use another", f"trainer.run_dir={run_dir}-2"),
            ])  # fmt: skip
        number = next(n for n in range(1, 10**6) if not run_dir.with_name(f"{run_dir.name}.{n}").exists())
        run_dir.rename(run_dir.with_name(f"{run_dir.name}.{number}"))
        notes.append(f"earlier run moved to {run_dir.with_name(f'{run_dir.name}.{number}')}")
    run_dir.mkdir(parents=True, exist_ok=True)
    return notes


def write_config(run_dir: Path, run: RunConfig) -> None:
    """Write the resolved config, with absolute paths, so that the run can be continued from anywhere."""
    aside = run_dir / f".{CONFIG_FILE}.part"
    aside.write_text(dump_value(_plain(run.model_dump()), default_flow_style=False) + "\n", encoding="utf-8")
    aside.replace(run_dir / CONFIG_FILE)


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value.absolute())
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value
