"""Whole runs that end otherwise than planned."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from drivetrain.cli.main import run
from drivetrain.driver import checkpoints


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "run"


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def train(run_file: Path, run_dir: Path, *more: str) -> list[str]:
    return ["train", str(run_file), f"trainer.run_dir={run_dir}", *more]


def wait_for_steps(process: subprocess.Popen[str], run_dir: Path, count: int) -> None:
    path, deadline = run_dir / "metrics.jsonl", time.monotonic() + 120
    while not path.exists() or path.read_text().count("\n") < count:
        assert process.poll() is None and time.monotonic() < deadline, "the run took no steps"
        time.sleep(0.1)


def test_ctrl_c_saves_the_step_and_resuming_goes_on(run_file: Path, run_dir: Path) -> None:
    program = [sys.executable, "-c", "from drivetrain.cli.main import main; main()"]
    process = subprocess.Popen([*program, *train(run_file, run_dir, "trainer.steps=100000")],
                               stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)  # fmt: skip
    try:
        wait_for_steps(process, run_dir, 3)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, said
    done = metrics(run_dir)[-1]["step"]
    assert f"stopped after step {done}" in said and "--resume auto" in said and "Traceback" not in said
    assert checkpoints.newest(run_dir, print) == checkpoints.folder_of(run_dir, done)
    assert run(["train", str(run_dir / "config.yaml"), "--resume", "auto", f"trainer.steps={done + 2}"]) == 0
    assert [row["step"] for row in metrics(run_dir)] == list(range(done + 3))
    assert checkpoints.newest(run_dir, print) == checkpoints.folder_of(run_dir, done + 2)


def test_a_resumed_run_takes_the_steps_that_it_would_have_taken(run_file: Path, run_dir: Path) -> None:
    assert run(train(run_file, run_dir, "trainer.save_every=2")) == 0
    whole = metrics(run_dir)
    first = checkpoints.folder_of(run_dir, 2)
    assert run(["train", str(run_dir / "config.yaml"), "--resume", str(first)]) == 0
    assert [row["step"] for row in metrics(run_dir)] == [0, 1, 2, 3, 4]
    for again, before in zip(metrics(run_dir)[3:], whole[3:]):
        same = {name for name in before if name.startswith("train/")}
        assert {name: again[name] for name in same} == pytest.approx({name: before[name] for name in same}, rel=1e-6)


def test_a_checkpoint_answers_from_inside_its_folder(
    run_file: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(train(run_file, run_dir, "trainer.steps=1")) == 0
    monkeypatch.chdir(checkpoints.newest(run_dir, print))
    capsys.readouterr()
    assert run(["generate", ".", "--prompt", "12=", "--samples", "2"]) == 0
    assert [line[:3] for line in capsys.readouterr().out.splitlines()] == ["12=", "12="]


def test_a_reward_that_raises_ends_the_run(run_file: Path, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reward = f"rewards=[{{name: function, label: judge, path: '{run_file.parent / 'judge.py'}:fussy'}}]"
    assert run(train(run_file, run_dir, reward)) == 1
    said = capsys.readouterr()
    assert "error: reward 'judge' raised LookupError: the judge is out" in said.err
    assert "prompt '23='" in said.err and "Traceback" not in said.err
    assert checkpoints.complete(run_dir) == [] and "failed: 0 of 4 steps" in said.out


def poisoned(run_file: Path, tmp_path: Path) -> Path:
    """The policy with one weight that is no number."""
    folder = tmp_path / "poisoned"
    shutil.copytree(run_file.parent / "policy", folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_weights_that_are_no_numbers_are_not_trained_on(
    run_file: Path, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = poisoned(run_file, run_dir.parent)
    assert run(train(run_file, run_dir, f"model.path={model}", "trainer.save_every=1")) == 1
    assert "not finite" in (said := capsys.readouterr().err) and "Traceback" not in said
    assert checkpoints.complete(run_dir) == []


HUGE = """
calls = []

def huge(response):  # from the second step on
    calls.append(response)
    return 3e38 if len(calls) > 12 and len(calls) % 2 else 0.0
"""


def test_a_loss_that_is_no_number_ends_the_run(
    run_file: Path, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run_dir.parent / "huge.py").write_text(HUGE)
    options = ["rewards=[{name: function, path: './huge.py:huge'}]", "algorithm.normalize_by_std=false",
               "trainer.save_every=1", "algorithm.clip_high=5"]  # fmt: skip
    assert run(train(run_file, run_dir, *options)) == 1
    assert "no weight was changed" in capsys.readouterr().err
    assert [checkpoints.read_state(path)["step"] for path in checkpoints.complete(run_dir)] == [1]
    assert [row["step"] for row in metrics(run_dir)] == [0, 1]


def test_no_checkpoint_of_an_absurd_learning_rate_holds_what_is_no_number(run_file: Path, run_dir: Path) -> None:
    assert (
        run(train(run_file, run_dir, "actor.optimizer.lr=1e30", "actor.mini_batch_prompts=4", "trainer.save_every=1"))
        == 1
    )
    found = checkpoints.complete(run_dir)
    assert [checkpoints.read_state(path)["step"] for path in found] == [1]
    for path in found[0].rglob("*.safetensors"):
        assert all(tensor.isfinite().all() for tensor in load_file(path).values())
    assert os.listdir(run_dir / "checkpoints") == [found[0].name]
