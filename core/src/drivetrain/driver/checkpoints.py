"""Checkpoints of a run: written aside, renamed when complete, and found again."""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from drivetrain.errors import CheckpointError, UserError
from drivetrain.protocol import DataProto

STATE_FILE = "driver.json"
CHECKSUMS_FILE = "checksums.json"
BATCHES = "algorithm"  # the folder of the batches in the algorithm's state
BEST = "best"  # a link to the best checkpoint


def folder_of(run_dir: Path, step: int) -> Path:
    """Where the checkpoint of a step stands."""
    return run_dir / "checkpoints" / f"step-{step:06d}"


def begin(
    run_dir: Path, step: int, state: Mapping[str, Any], write_models: Callable[[Path], None],
    batches: Mapping[str, DataProto] = {},
) -> None:  # fmt: skip
    """Write a checkpoint aside, or the part of it that is not left to the background.

    What runs that were killed left there is removed.

    Args:
        state: of the driver, as JSON values.
        write_models: writes the models' state into the folder it is given, or begins to.
        batches: of the algorithm's state, by name.
    """
    aside = _aside(run_dir, step)
    for left in aside.parent.glob(".step-*.part"):
        shutil.rmtree(left, ignore_errors=True)
    aside.mkdir(parents=True)
    write_models(aside)
    for name, batch in batches.items():
        batch.save(aside / BATCHES / name)
    (aside / STATE_FILE).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")


def commit(run_dir: Path, step: int) -> Path:
    """Put the checkpoint that was begun in its place, all its files being there; returns its folder."""
    aside, final = _aside(run_dir, step), folder_of(run_dir, step)
    (aside / CHECKSUMS_FILE).write_text(json.dumps(_checksums(aside), indent=2) + "\n", encoding="utf-8")
    _remove(final)
    aside.rename(final)
    return final


def _aside(run_dir: Path, step: int) -> Path:
    return folder_of(run_dir, step).with_name(f".step-{step:06d}.part")


def complete(run_dir: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    return sorted(p.parent for p in (run_dir / "checkpoints").glob(f"step-*/{STATE_FILE}"))


def keep_last(run_dir: Path, count: int, step: int, *, highest: bool = True) -> None:
    """Remove all checkpoints but the newest ``count`` up to ``step``, and the best of these if they have a merit.

    A run that went back takes later steps again. ``checkpoints/best`` comes to point to the best, of equals the first.

    Args:
        highest: whether the best has the highest ``merit`` in its state, or the lowest.
    """
    found = complete(run_dir)
    reached = [folder for folder in found if folder.name <= folder_of(run_dir, step).name]
    kept = reached[-count:]
    merits = {folder: merit for folder in reached if (merit := read_state(folder).get("merit")) is not None}
    if merits:
        best = (max if highest else min)(merits, key=merits.__getitem__)
        kept.append(best)
        _link(best.with_name(BEST), best)
    for folder in found:
        if folder not in kept:
            _remove(folder)


def _link(link: Path, folder: Path) -> None:
    aside = link.with_name(f".{link.name}.part")
    aside.unlink(missing_ok=True)
    aside.symlink_to(folder.name)
    aside.replace(link)


def _remove(folder: Path) -> None:
    """Remove a checkpoint, hidden first: one that is removed in part is never found."""
    if folder.exists():
        aside = folder.with_name(f".{folder.name}.old")
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)
        shutil.rmtree(aside)


def find(where: Path, say: Callable[[str], None]) -> Path:
    """The checkpoint that a path means: a checkpoint's folder, or a run's folder (its newest that is sound).

    Raises:
        UserError: there is none.
        CheckpointError: the checkpoint named is damaged.
    """
    if (where / STATE_FILE).is_file():
        if fault := damage(where):
            raise CheckpointError(f"the checkpoint is damaged: {fault}", where=str(where), mend="take an earlier one")
        return where
    found = newest(where, say)
    if found is None:
        raise UserError("no complete checkpoint", where=str(where), mend="give a run folder or one of its checkpoints")
    return found


def newest(run_dir: Path, say: Callable[[str], None]) -> Path | None:
    """The newest sound checkpoint of a run, if it has one; each damaged one that is passed over is said."""
    for folder in reversed(complete(run_dir)):
        fault = damage(folder)
        if not fault:
            return folder
        say(f"passed over the damaged checkpoint {folder}: {fault}")
    return None


def damage(folder: Path) -> str:
    """What is wrong with the files of a checkpoint; empty if they are as they were written."""
    try:
        written = json.loads((folder / CHECKSUMS_FILE).read_text(encoding="utf-8"))
        found = _checksums(folder)
    except (OSError, ValueError) as cause:
        return f"{CHECKSUMS_FILE}: {cause}"
    wrong = sorted(name for name in {*written, *found} if written.get(name) != found.get(name))
    return f"{wrong[0]} is not as it was written" if wrong else ""


def _checksums(folder: Path) -> dict[str, list[int]]:
    """Size in bytes and CRC-32 of each file."""
    sums = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.name != CHECKSUMS_FILE):
        crc = 0
        with path.open("rb") as file:
            while part := file.read(1 << 24):
                crc = zlib.crc32(part, crc)
        sums[str(path.relative_to(folder))] = [path.stat().st_size, crc]
    return sums


def read_state(folder: Path) -> dict[str, Any]:
    """The driver's state of a checkpoint."""
    try:
        state: dict[str, Any] = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
        if not isinstance(state, dict):
            raise ValueError("it holds no JSON object")
    except (OSError, ValueError) as cause:
        raise CheckpointError("the checkpoint cannot be read", where=str(folder / STATE_FILE)) from cause
    return state


def read_batches(folder: Path) -> dict[str, DataProto]:
    """The batches of the algorithm's state in a checkpoint, by name."""
    return {path.name: DataProto.load(path) for path in sorted((folder / BATCHES).glob("*"))}
