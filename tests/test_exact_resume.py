"""A run that is killed, wherever it stands, goes on as if nothing had happened: bit for bit."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import forked
import pytest
import tiny
from safetensors.torch import load_file

STEPS = 30
KILLS = 6
#: batches of 30 of 100 prompts cross an epoch's end; a checkpoint every second step
SETTINGS = ["data.batch_prompts=30", f"trainer.steps={STEPS}", "trainer.save_every=2", "trainer.eval_every=5",
            "trainer.keep_checkpoints=3"]  # fmt: skip


def start(config: Path, run_dir: Path, *more: str) -> ForkServerProcess:
    words = ["train", config, *SETTINGS, f"trainer.run_dir={run_dir}", *more]
    return forked.start([*map(str, words)], output_of(run_dir))


def output_of(run_dir: Path) -> Path:
    return run_dir.with_name(f"{run_dir.name}.log")


def warm_up(folder: Path, drivetrain) -> None:
    """Put a model that was trained a little in the place of the random one."""
    drivetrain("train", folder / "sft.yaml", f"trainer.run_dir={folder / 'warm-run'}")
    drivetrain("export", folder / "warm-run", folder / "warm")
    (folder / "model").rename(folder / "random-model")
    (folder / "warm").rename(folder / "model")


def finish(process: ForkServerProcess, run_dir: Path) -> None:
    process.join(600)
    assert process.exitcode == 0, output_of(run_dir).read_text()


def numbers(run_dir: Path) -> list[dict[str, float]]:
    """The metrics of all steps, without those that measure time."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "throughput/"))} for row in rows]


def state(run_dir: Path) -> dict[str, bytes]:
    """Every file of the last checkpoint but those that only say how it was written."""
    folder = run_dir / "checkpoints" / f"step-{STEPS:06d}"
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def steps_logged(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait(process: ForkServerProcess, until) -> bool:
    """Wait for a condition; False if the process ended before it held."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        if until():
            return True
        if not process.is_alive():
            return False
        time.sleep(0.002)
    raise AssertionError("the run makes no progress")


def kill_somewhere(process: ForkServerProcess, run_dir: Path, draw: random.Random, how: signal.Signals) -> bool:
    """Kill a run at a random moment, every third time inside a save; False if it ended first."""
    if draw.random() < 1 / 3:
        reached = wait(process, lambda: any((run_dir / "checkpoints").glob(".step-*.part")))
    else:
        target = steps_logged(run_dir) + draw.randint(1, 3)
        reached = wait(process, lambda: steps_logged(run_dir) >= target)
        time.sleep(draw.uniform(0, 0.1) * reached)
    with contextlib.suppress(ProcessLookupError):  # it has ended
        os.kill(process.pid, how)
    process.join(300)
    return reached and process.exitcode != 0


@pytest.mark.parametrize(
    "name, how, background",
    [
        ("sft", signal.SIGKILL, False),
        ("grpo", signal.SIGKILL, False),
        ("ppo", signal.SIGKILL, True),
        ("grpo", signal.SIGTERM, True),
    ],
)
def test_a_killed_run_goes_on_bit_for_bit(
    tmp_path: Path, name: str, how: signal.Signals, background: bool, drivetrain
) -> None:
    """Also one that writes checkpoints in the background, which are those of one that does not."""
    sft, grpo = tiny.write_configs(tmp_path)
    config, more = (sft if name == "sft" else grpo), ([] if name == "grpo" else [f"algorithm.name={name}"])
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    if name != "sft":  # from a model that gets some answers right, or there would be nothing to learn
        warm_up(tmp_path, drivetrain)
    finish(start(config, whole, *more), whole)
    assert numbers(whole)[-1]["train/grad_norm"] > 0
    more = [*more, f"trainer.save_in_background={background}"]

    seed = random.SystemRandom().randrange(10**6)
    print(f"seed of the kill points: {seed}")
    draw = random.Random(seed)
    kills = 0
    for _ in range(40):
        kills += kill_somewhere(start(config, broken, "--resume", "auto", *more), broken, draw, how)
        if kills == KILLS or steps_logged(broken) > STEPS:
            break
    finish(start(config, broken, "--resume", "auto", *more), broken)

    assert kills >= 5, "hardly anything was killed"
    assert numbers(broken) == numbers(whole)
    assert state(broken) == state(whole)


def test_another_micro_batch_size_agrees_within_rounding(tmp_path: Path, drivetrain) -> None:
    sft, _ = tiny.write_configs(tmp_path)
    other = ("--resume", "auto", "actor.backend.micro_batch_tokens=64")
    for name, steps, more in (("whole", 6, ()), ("part", 4, ()), ("part", 6, other)):
        drivetrain("train", sft, *SETTINGS, f"trainer.run_dir={tmp_path / name}", f"trainer.steps={steps}", *more)
    whole, part = (load_file(next((tmp_path / d).glob("checkpoints/step-000006/actor/*.safetensors")))
                   for d in ("whole", "part"))  # fmt: skip
    assert whole.keys() == part.keys()
    largest = max(float((whole[key].double() - part[key].double()).abs().max()) for key in whole)
    assert 0 < largest < 1e-3  # 0 would mean that the setting was not read


def test_a_run_folder_in_use_is_locked(tmp_path: Path, drivetrain) -> None:
    sft, _ = tiny.write_configs(tmp_path)
    first = start(sft, tmp_path / "run", "trainer.steps=100000")
    try:
        wait(first, lambda: steps_logged(tmp_path / "run") > 0)
        second = drivetrain("train", sft, f"trainer.run_dir={tmp_path / 'run'}", "--resume", "auto", code=2)
        assert "in use by another process" in second.stderr
    finally:
        first.kill()
        first.join()
