"""Supervised and reinforcement learning of a tiny task, from the command line, and what can be done with the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def metrics_of(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


def test_sft_then_grpo_learn(folder: Path, drivetrain_process) -> None:
    """Supervised learning gets somewhere, and reinforcement learning from there further; in processes of their own."""
    sft, grpo = tiny.write_configs(folder)
    drivetrain_process("train", sft)
    before, *_, after = metrics_of(folder / "runs/sft")
    assert before["step"] == 0 and after["eval/accuracy"] >= before["eval/accuracy"] + 0.15

    drivetrain_process("export", folder / "runs/sft", folder / "warm")
    out = drivetrain_process("train", grpo, f"model.path={folder / 'warm'}")
    rows = metrics_of(folder / "runs/grpo")
    assert [row["step"] for row in rows] == list(range(41))
    # the exported model is the trained one
    assert rows[0]["eval/accuracy"] == pytest.approx(after["eval/accuracy"], abs=0.011)
    # 100 prompts: three standard errors of a share are at most 0.15
    assert rows[-1]["eval/accuracy"] >= rows[0]["eval/accuracy"] + 0.2
    assert "\x1b" not in out.stdout and "step 40/40" in out.stdout

    report = drivetrain_process("eval", folder / "runs/grpo", "--json")
    assert json.loads(report.stdout)["eval/accuracy"] == rows[-1]["eval/accuracy"]
    answer = drivetrain_process("generate", folder / "runs/grpo", "--prompt", "3,7=")
    assert answer.stdout.startswith("3,7=")


def test_export_reloads_with_equal_logits(tmp_path: Path, drivetrain) -> None:
    """A checkpoint's exported model gives the same greedy answers and finite, equal logits wherever it is loaded."""
    sft, _ = tiny.write_configs(tmp_path)
    drivetrain("train", sft, "trainer.steps=2")
    drivetrain("export", tmp_path / "runs/sft", tmp_path / "out")
    drivetrain("export", tmp_path / "runs/sft", tmp_path / "out", code=2)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokens = AutoTokenizer.from_pretrained(tmp_path / "out")(["3,7=", "0,0="], return_tensors="pt")["input_ids"]
    from safetensors.torch import load_file

    start = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    with torch.no_grad():
        trained, untrained = exported(tokens).logits, start(tokens).logits
    assert not torch.allclose(trained, untrained)
    checkpoint = load_file(next((tmp_path / "runs/sft/checkpoints").glob("step-*/actor/*.safetensors")))
    weights = dict(exported.named_parameters())
    matched = [name for name in weights if any(key.endswith(name) for key in checkpoint)]
    assert len(matched) == len(weights)
    for name in matched:
        key = min((key for key in checkpoint if key.endswith(name)), key=len)
        assert torch.equal(checkpoint[key], weights[name]), name


def test_an_earlier_run_is_never_lost(tmp_path: Path, drivetrain) -> None:
    """A run folder in use is refused; --overwrite moves it aside; --resume continues it."""
    sft, _ = tiny.write_configs(tmp_path)
    drivetrain("train", sft, "trainer.steps=2")
    refused = drivetrain("train", sft, "trainer.steps=2", code=2)
    assert "holds an earlier run" in refused.stderr and "Traceback" not in refused.stderr
    drivetrain("train", sft, "trainer.steps=4", "--resume", "auto")
    assert [row["step"] for row in metrics_of(tmp_path / "runs/sft")] == [0, 1, 2, 3, 4]
    drivetrain("train", sft, "trainer.steps=1", "--overwrite")
    assert [row["step"] for row in metrics_of(tmp_path / "runs/sft.1")] == [0, 1, 2, 3, 4]


def test_a_new_algorithm_trains(tmp_path: Path, drivetrain) -> None:
    """`drivetrain new algorithm` writes a package that pip installs and a config selects by name."""
    import subprocess
    import sys

    _, grpo = tiny.write_configs(tmp_path)
    drivetrain("new", "algorithm", "shiny-algo")
    drivetrain("new", "algorithm", "shiny-algo", code=2)
    drivetrain("new", "algorithm", "grpo", code=2)
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target", site]
    subprocess.run([*map(str, pip), str(tmp_path / "shiny-algo")], check=True)
    script = "import sys; sys.path.insert(0, sys.argv.pop(1)); from drivetrain.cli.main import main; main()"
    command = [sys.executable, "-c", script, site, "train", grpo, "algorithm.name=shiny-algo", "trainer.steps=2"]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "dropped algorithm.clip_high=0.28" in done.stdout
    assert metrics_of(tmp_path / "runs/grpo")[-1]["step"] == 2
