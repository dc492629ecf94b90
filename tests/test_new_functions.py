"""An advantage estimator or a policy loss alone, in a package of its own: written, installed, tested, trained with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import yaml

PROGRAM = "import sys; sys.path.insert(0, sys.argv.pop(1)); from drivetrain.cli.main import main; main()"
Made = Callable[[str], Path]


@pytest.fixture
def installed(tmp_path: Path, drivetrain) -> Made:
    """Writes a distribution of a kind, called shiny, and installs it by pip into a folder of packages."""

    def install(kind: str) -> Path:
        drivetrain("new", kind, "shiny")
        drivetrain("new", kind, "shiny", code=2)
        site = tmp_path / "site"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target"]
        subprocess.run([*pip, str(site), str(tmp_path / "shiny")], check=True)
        return site

    return install


def train(site: Path, config: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM, site, "train", config, *overrides]
    return subprocess.run([*map(str, command)], capture_output=True, text=True, cwd=config.parent)


def check_tests(site: Path, folder: Path, count: int) -> None:
    """The distribution's own tests pass where it is installed."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.strip().splitlines()[-1].split(" passed")[0].split()[-1]) >= count, done.stdout


def last_step(run_dir: Path) -> dict[str, float]:
    return json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])


def test_a_new_advantage_estimator_trains(tmp_path: Path, installed: Made) -> None:
    _, grpo = tiny.write_configs(tmp_path)
    site = installed("advantage")
    done = train(site, grpo, "algorithm.advantage=shiny", "algorithm.advantage_args={bound: 0.5}", "trainer.steps=2")
    assert done.returncode == 0, done.stderr
    assert last_step(tmp_path / "runs/grpo")["step"] == 2
    refused = train(site, grpo, "algorithm.advantage=shiny", "algorithm.advantage_args={bounds: 1}", "--overwrite")
    assert refused.returncode == 2 and "its options: bound" in refused.stderr
    check_tests(site, tmp_path / "shiny", 6)


def test_a_new_policy_loss_trains(tmp_path: Path, installed: Made) -> None:
    _, grpo = tiny.write_configs(tmp_path)
    site = installed("loss")
    refused = train(site, grpo, "algorithm.policy_loss=shiny", "trainer.steps=2")
    assert refused.returncode == 2 and "policy loss 'shiny' does not read 'clip_high'" in refused.stderr
    run = yaml.safe_load(grpo.read_text())
    del run["algorithm"]["clip_high"]
    grpo.write_text(yaml.safe_dump(run))
    done = train(site, grpo, "algorithm.policy_loss=shiny", "algorithm.policy_loss_args={penalty: 0.5}",
                 "trainer.steps=2")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert last_step(tmp_path / "runs/grpo")["train/log_ratio_squared"] >= 0
    check_tests(site, tmp_path / "shiny", 6)
