"""The command line on two processes: a run, its end by signals, and an address of no cluster."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from command_rig import finishes, metrics_of, start, title, wait_for

from drivetrain.testing.processes import marked_processes


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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_after_its_step_and_nothing_stays(config: Path, tmp_path: Path, number: int) -> None:
    marker = f"test-marker-{os.getpid()}-{number}"
    process = start("train", config, f"trainer.run_dir={tmp_path}", "trainer.steps=100000", A_MARK_OF_THIS_TEST=marker)
    wait_for(process, lambda: (tmp_path / "metrics.jsonl").exists() and len(metrics_of(tmp_path)) > 1)
    assert len(marked_processes(marker)) > 3  # the driver, Ray's own and the workers
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does
    else:
        process.send_signal(number)
    out = finishes(process)
    assert process.returncode == 130, out
    assert "stopped after step" in out
    assert marked_processes(marker) == []


def test_a_killed_worker_ends_the_run_with_one_error(config: Path, tmp_path: Path) -> None:
    marker = f"test-marker-{os.getpid()}-killed"
    process = start("train", config, f"trainer.run_dir={tmp_path}", "trainer.steps=100000", A_MARK_OF_THIS_TEST=marker)
    wait_for(process, lambda: (tmp_path / "metrics.jsonl").exists() and len(metrics_of(tmp_path)) > 1)
    log = next((tmp_path / "logs").glob("*-rank1.log")).read_text()
    os.kill(int(log.split("process ")[1].split()[0]), signal.SIGKILL)
    out = finishes(process)
    assert process.returncode == 1, out
    assert out.count("error:") == 1 and "rank 1 on" in out and "died" in out
    assert marked_processes(marker) == []


def test_a_second_signal_ends_the_run_at_once_and_nothing_stays(config: Path, tmp_path: Path) -> None:
    marker = f"test-marker-{os.getpid()}-twice"
    (tmp_path / "slow.py").write_text("import time\n\ndef score(response):\n    time.sleep(40)\n    return 0.0\n")
    reward = f"rewards=[{{name: function, path: {tmp_path}/slow.py:score}}]"
    process = start("train", config, reward, f"trainer.run_dir={tmp_path / 'run'}", A_MARK_OF_THIS_TEST=marker)
    wait_for(process, lambda: (tmp_path / "run" / "metrics.jsonl").exists())
    process.send_signal(signal.SIGTERM)
    assert process.stdout is not None
    first = next(line for line in process.stdout if "once more stops at once" in line)
    process.send_signal(signal.SIGTERM)
    out = first + finishes(process)
    assert process.returncode == 130, out
    assert marked_processes(marker) == [], out


def test_an_error_of_the_driver_leaves_nothing(config: Path, tmp_path: Path) -> None:
    marker = f"test-marker-{os.getpid()}-error"
    (tmp_path / "broken.py").write_text("def score(response):\n    raise ValueError('broken')\n")
    reward = f"rewards=[{{name: function, path: {tmp_path}/broken.py:score}}]"
    process = start("train", config, reward, f"trainer.run_dir={tmp_path / 'run'}", A_MARK_OF_THIS_TEST=marker)
    out = finishes(process)
    assert process.returncode == 1 and "broken" in out, out
    assert marked_processes(marker) == []


def test_a_killed_driver_takes_its_processes_along(config: Path, tmp_path: Path) -> None:
    """Two agents of Ray's, which hold no device, follow by themselves when they have looked for Ray in vain."""
    marker = f"test-marker-{os.getpid()}-driver"
    process = start("train", config, f"trainer.run_dir={tmp_path}", "trainer.steps=100000", A_MARK_OF_THIS_TEST=marker)
    wait_for(process, lambda: (tmp_path / "metrics.jsonl").exists() and len(metrics_of(tmp_path)) > 1)
    process.kill()
    process.wait()
    until = time.monotonic() + 60
    while (left := [pid for pid in marked_processes(marker) if "Agent" not in title(pid)]) and time.monotonic() < until:
        time.sleep(0.2)
    assert left == []
    for pid in marked_processes(marker):
        os.kill(pid, signal.SIGKILL)


def test_no_cluster_at_the_address(config: Path, tmp_path: Path) -> None:
    process = start(
        "train", config, f"trainer.run_dir={tmp_path}", "executor.address=127.0.0.1:1", "executor.num_cpus=null"
    )
    out = finishes(process)
    assert process.returncode == 2, out
    assert "no Ray cluster answers at '127.0.0.1:1'" in out
