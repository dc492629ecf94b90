"""An earlier run is never lost, and the config that is kept is the one that ran."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from driver_rig import Little

from drivetrain.driver import run_folder
from drivetrain.errors import UserError


def used(folder: Path, text: str) -> Path:
    folder.mkdir()
    (folder / run_folder.CONFIG_FILE).write_text(text)
    return folder


def test_a_new_folder_is_made(tmp_path: Path) -> None:
    assert run_folder.prepare(tmp_path / "a" / "b", resuming=False, overwrite=False) == []
    assert (tmp_path / "a" / "b").is_dir()


def test_an_earlier_run_is_refused(tmp_path: Path) -> None:
    folder = used(tmp_path / "run", "first")
    with pytest.raises(UserError, match="--resume auto") as raised:
        run_folder.prepare(folder, resuming=False, overwrite=False)
    assert "--overwrite" in str(raised.value)
    assert (folder / run_folder.CONFIG_FILE).read_text() == "first"


def test_overwriting_moves_every_earlier_run_aside(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for text in ("first", "second"):
        used(run, text)
        [note] = run_folder.prepare(run, resuming=False, overwrite=True)
        assert "moved to" in note and list(run.iterdir()) == []
        run.rmdir()
    kept = [(tmp_path / f"run.{number}" / run_folder.CONFIG_FILE).read_text() for number in (1, 2)]
    assert kept == ["first", "second"]


def test_resuming_leaves_everything_as_it_is(tmp_path: Path) -> None:
    folder = used(tmp_path / "run", "first")
    assert run_folder.prepare(folder, resuming=True, overwrite=True) == []
    assert (folder / run_folder.CONFIG_FILE).read_text() == "first"


def test_the_written_config_is_the_config_that_ran(
    little: Little, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = little.config(
        "actor.max_grad_norm=null", "data.train.answer_key=null", "data.template='Q: {prompt}\\n'",
        "data.train.data_source='1e3'", "rollout.stop=['null', ' ']", "trainer.run_dir=here",
    )  # fmt: skip
    run_folder.write_config(tmp_path, run)
    monkeypatch.chdir("/")
    again = little.config(path=tmp_path / run_folder.CONFIG_FILE)
    assert again.actor.max_grad_norm is None and again.data.train.answer_key is None
    assert again.trainer.run_dir == tmp_path / "here"
    for changed in ("model", "trainer", "data"):  # which hold paths
        assert getattr(again, changed) != getattr(run, changed)
    same = {"algorithm", "actor", "rollout", "rewards", "trackers", "executor", "hardware", "critic", "ref"}
    assert again.model_dump(include=same) == run.model_dump(include=same)
    assert again.data.template == run.data.template and again.data.train.data_source == "1e3"
    assert yaml.safe_load((tmp_path / run_folder.CONFIG_FILE).read_text())["trainer"]["steps"] == 4
