"""Checkpoints appear whole or not at all, and the right one is found."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from drivetrain.driver import checkpoints
from drivetrain.errors import CheckpointError, UserError


def written(run_dir: Path, step: int, write_models: Callable[[Path], None]) -> Path:
    checkpoints.begin(run_dir, step, {"step": step}, write_models)
    return checkpoints.commit(run_dir, step)


def save(run_dir: Path, step: int, text: str = "weights") -> Path:
    return written(run_dir, step, lambda folder: _write(folder, text))


def _write(folder: Path, text: str) -> None:
    (folder / "model").write_text(text)


def test_a_checkpoint_appears_only_when_it_is_complete(tmp_path: Path) -> None:
    seen: list[Path] = []
    folder = written(tmp_path, 3, lambda _: seen.extend(checkpoints.complete(tmp_path)))
    assert seen == [] and checkpoints.complete(tmp_path) == [folder]
    assert folder == tmp_path / "checkpoints" / "step-000003" and checkpoints.read_state(folder) == {"step": 3}


def test_what_a_crash_leaves_is_never_found(tmp_path: Path) -> None:
    first = save(tmp_path, 1)

    def crash(folder: Path) -> None:
        _write(folder, "half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        written(tmp_path, 2, crash)
    assert checkpoints.find(tmp_path, print) == first
    left = next(path for path in (tmp_path / "checkpoints").iterdir() if path != first)
    (left / checkpoints.STATE_FILE).write_text("{}")  # as if it had happened just before the renaming
    assert checkpoints.find(tmp_path, print) == first
    again = save(tmp_path, 2)
    assert [path.name for path in again.iterdir() if path.name == "model"] == ["model"]
    assert checkpoints.find(tmp_path, print) == again and not left.exists()


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 1, "old")
    folder = save(tmp_path, 1, "new")
    assert (folder / "model").read_text() == "new"
    assert list(folder.parent.iterdir()) == [folder]


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 10, 9):
        save(tmp_path, step)
    checkpoints.keep_last(tmp_path, 2, step=10)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-000009", "step-000010"]


def test_later_steps_of_a_run_that_went_back_are_not_taken_for_the_newest(tmp_path: Path) -> None:
    for step in (2, 4, 6, 3):  # step 3 was taken again from step 2
        save(tmp_path, step)
    checkpoints.keep_last(tmp_path, 1, step=3)
    assert checkpoints.find(tmp_path, print).name == "step-000003" and len(checkpoints.complete(tmp_path)) == 1


def test_removal_that_is_cut_short_leaves_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    remove = shutil.rmtree

    def cut_short(folder: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            (Path(folder) / "model").unlink()
            raise KeyboardInterrupt
        remove(folder, ignore_errors=True)

    monkeypatch.setattr(checkpoints.shutil, "rmtree", cut_short)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.keep_last(tmp_path, 1, step=2)
    assert [folder.name for folder in checkpoints.complete(tmp_path)] == ["step-000002"]


def test_a_run_and_a_checkpoint_can_be_named(tmp_path: Path) -> None:
    first, second = save(tmp_path, 1), save(tmp_path, 2)
    assert checkpoints.find(tmp_path, print) == second and checkpoints.find(first, print) == first
    for nothing in (tmp_path / "checkpoints", tmp_path / "elsewhere"):
        with pytest.raises(UserError, match="no complete checkpoint"):
            checkpoints.find(nothing, print)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", json.dumps({"step": 1})[:-1], "\x00\x00"])
def test_a_spoilt_state_is_said_to_be_one(tmp_path: Path, text: str) -> None:
    folder = save(tmp_path, 1)
    (folder / checkpoints.STATE_FILE).write_text(text)
    with pytest.raises(CheckpointError, match="driver.json"):
        checkpoints.read_state(folder)


def saved(run_dir: Path, step: int) -> Path:
    def write(folder: Path) -> None:
        (folder / "actor").mkdir()
        (folder / "actor" / "weights").write_bytes(bytes(range(256)) * step)

    return written(run_dir, step, write)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: flip(folder / "actor" / "weights"),
        lambda folder: (folder / "actor" / "weights").write_bytes(b""),
        lambda folder: (folder / "actor" / "weights").unlink(),
        lambda folder: (folder / "more").touch(),
        lambda folder: flip(folder / "driver.json"),
        lambda folder: (folder / "checksums.json").unlink(),
        lambda folder: (folder / "checksums.json").write_text("{"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_with_a_word(tmp_path: Path, spoil) -> None:
    first, second = saved(tmp_path, 1), saved(tmp_path, 2)
    said: list[str] = []
    assert checkpoints.find(tmp_path, said.append) == second and not said
    spoil(second)
    assert checkpoints.find(tmp_path, said.append) == first
    assert len(said) == 1 and "passed over the damaged checkpoint" in said[0] and "step-000002" in said[0]
    with pytest.raises(CheckpointError, match="damaged"):
        checkpoints.find(second, said.append)
    spoil(first)
    assert checkpoints.newest(tmp_path, said.append) is None
