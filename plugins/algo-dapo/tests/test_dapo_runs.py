"""Whole runs: a surplus survives a checkpoint, and settings that cannot be meant are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import dapo_rig as rig
import pytest

from drivetrain import ConfigError, DataProto
from drivetrain.cli.main import run
from drivetrain.driver import checkpoints


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "run"


def train(run_file: Path, run_dir: Path, *more: str) -> list[str]:
    return ["train", str(run_file), f"trainer.run_dir={run_dir}", "trainer.save_every=1", "trainer.keep_checkpoints=9",
            "algorithm.round_prompts=8", *more]  # fmt: skip


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name.startswith("train/")} for row in rows]


def kept(run_dir: Path, step: int) -> DataProto | None:
    folder = checkpoints.folder_of(run_dir, step) / "algorithm" / "surplus"
    return DataProto.load(folder) if folder.exists() else None


def test_a_run_that_resumes_with_a_surplus_takes_the_steps_that_it_would_have_taken(
    run_file: Path, run_dir: Path
) -> None:
    assert run(train(run_file, run_dir, "trainer.steps=6")) == 0
    whole, last = metrics(run_dir), kept(run_dir, 6)
    surpluses = {step: surplus for step in range(1, 6) if (surplus := kept(run_dir, step)) is not None}
    assert surpluses
    for step, surplus in surpluses.items():
        assert run(["train", str(run_dir / "config.yaml"), "--resume", str(checkpoints.folder_of(run_dir, step))]) == 0
        assert metrics(run_dir) == whole
        assert whole[step + 1]["train/surplus_age"] > 0 and whole[step]["train/surplus_groups"] == len(
            rig.uids(surplus)
        )
        again = kept(run_dir, 6)
        assert (again is None) == (last is None) and (again is None or again.equal(last))


def test_a_surplus_that_does_not_fit_the_settings_is_refused(
    run_file: Path, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(train(run_file, run_dir, "trainer.steps=6")) == 0
    step = next(step for step in range(1, 6) if kept(run_dir, step) is not None)
    resume = ["train", str(run_dir / "config.yaml"), "--resume", str(checkpoints.folder_of(run_dir, step))]
    assert run([*resume, "rollout.max_response_tokens=7"]) == 2
    said = capsys.readouterr().err
    assert "the groups kept in the checkpoint do not fit the settings" in said and "resume with the settings" in said


@pytest.mark.parametrize(
    "overrides, said",
    [
        (["algorithm.group_size=1"], "algorithm.group_size"),
        (["algorithm.filter_by=reward"], "algorithm.filter_by"),
        (["algorithm.max_rounds=0"], "algorithm.max_rounds"),
        (["algorithm.round_prompts=0"], "algorithm.round_prompts"),
        (["algorithm.too_few=skip"], "algorithm.too_few"),
        (["algorithm.overlong_cache_tokens=7"], "7 tokens are more than the longest response of 6"),
        (["algorithm.overlong_cache_tokens=2", "algorithm.overlong_penalty=0"], "not read while overlong_penalty is 0"),
        (["algorithm.overlong_penalty=-1"], "algorithm.overlong_penalty"),
        (["algorithm.advantage=gae"], "needs values"),
        (["algorithm.kl_in=reward"], "kl_in"),
        (["rollout.temperature=0"], "greedy sampling"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(run_file: Path, overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        rig.config(run_file, *overrides)
    assert said in str(raised.value)
