"""The command line on two processes: a run, its end by signals, and an address of no cluster."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

MAIN = [sys.executable, "-c", "from drivetrain.cli.main import main; main()"]


def environment() -> dict[str, str]:
    return {
        **{k: v for k, v in os.environ.items() if not k.startswith(("DRIVETRAIN_", "RAY_"))},
        "OMP_NUM_THREADS": "1",
    }


def start(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen([*MAIN, *map(str, arguments)], env=environment(), text=True, start_new_session=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip


@pytest.fixture(scope="module")
def config(folder: Path) -> Path:
    """A PPO run of three steps on two processes."""
    rows = [{"prompt": f"{a},{b}=", "answer": str(max(a, b))} for a in range(3) for b in range(3)]
    (folder / "digits.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = {
        "model": {"path": str(folder / "model")},
        "algorithm": {"name": "ppo", "kl_coef": 0.1},
        "actor": {"backend": {"name": "fsdp"}, "optimizer": {"name": "adamw", "lr": 1e-3}},
        "rollout": {"name": "hf", "max_response_tokens": 3},
        "hybrid_engine": {"name": "colocated"},
        "data": {"batch_prompts": 9, "train": {"name": "jsonl", "path": str(folder / "digits.jsonl")}},
        "rewards": [{"name": "exact_match"}],
        "executor": {"name": "ray", "processes": 2, "num_cpus": 8},
        "hardware": {"name": "cpu"},
        "trackers": [{"name": "jsonl"}, {"name": "lines"}],
        "trainer": {"steps": 3},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(run))
    return path


def metrics_of(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def mine(marker: str) -> list[int]:
    """Processes whose environment holds a marker."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and marker.encode() in (folder / "environ").read_bytes():
                if (folder / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                    found.append(int(folder.name))
        except OSError:
            continue
    return found


def finishes(process: subprocess.Popen[str]) -> str:
    out, _ = process.communicate(timeout=200)
    return out


def test_a_run_on_two_processes_is_that_of_one(config: Path, tmp_path: Path) -> None:
    ray = start("train", config, f"trainer.run_dir={tmp_path / 'ray'}")
    out = finishes(ray)
    assert ray.returncode == 0, out
    assert "placement: critic on 2 x cpu" in out and "actor + rollout + ref on 2 x cpu" in out
    local = start("train", config, "executor.name=local", f"trainer.run_dir={tmp_path / 'local'}")
    assert finishes(local) and local.returncode == 0
    steps = list(zip(metrics_of(tmp_path / "local"), metrics_of(tmp_path / "ray"), strict=True))[1:]
    assert len(steps) == 3
    for here, there in steps:
        assert there["transfer/bytes"] > 0 and there["transfer/s"] > 0
        for name in ("train/reward", "train/loss", "train/grad_norm", "train/critic_loss", "train/kl"):
            assert there[name] == pytest.approx(here[name], abs=1e-4), name
    assert len(list((tmp_path / "ray" / "logs").glob("*-rank1.log"))) == 1, "the roles share processes"


def wait_for(process: subprocess.Popen[str], found: Callable[[], bool]) -> None:
    while not found():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_after_its_step_and_nothing_stays(config: Path, tmp_path: Path, number: int) -> None:
    marker = f"test-marker-{os.getpid()}-{number}"
    os.environ["A_MARK_OF_THIS_TEST"] = marker
    try:
        process = start("train", config, f"trainer.run_dir={tmp_path}", "trainer.steps=100000")
    finally:
        del os.environ["A_MARK_OF_THIS_TEST"]
    wait_for(process, lambda: (tmp_path / "metrics.jsonl").exists() and len(metrics_of(tmp_path)) > 1)
    assert len(mine(marker)) > 3  # the driver, Ray's own and the workers
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does
    else:
        process.send_signal(number)
    out = finishes(process)
    assert process.returncode == 130, out
    assert "stopped after step" in out
    assert mine(marker) == []


def test_a_killed_worker_ends_the_run_with_one_error(config: Path, tmp_path: Path) -> None:
    marker = f"test-marker-{os.getpid()}-killed"
    os.environ["A_MARK_OF_THIS_TEST"] = marker
    try:
        process = start("train", config, f"trainer.run_dir={tmp_path}", "trainer.steps=100000")
    finally:
        del os.environ["A_MARK_OF_THIS_TEST"]
    wait_for(process, lambda: (tmp_path / "metrics.jsonl").exists() and len(metrics_of(tmp_path)) > 1)
    log = next((tmp_path / "logs").glob("*-rank1.log")).read_text()
    os.kill(int(log.split("process ")[1].split()[0]), signal.SIGKILL)
    out = finishes(process)
    assert process.returncode == 1, out
    assert out.count("error:") == 1 and "rank 1 on" in out and "died" in out
    assert mine(marker) == []


def test_no_cluster_at_the_address(config: Path, tmp_path: Path) -> None:
    process = start(
        "train", config, f"trainer.run_dir={tmp_path}", "executor.address=127.0.0.1:1", "executor.num_cpus=null"
    )
    out = finishes(process)
    assert process.returncode == 2, out
    assert "no Ray cluster answers at '127.0.0.1:1'" in out
