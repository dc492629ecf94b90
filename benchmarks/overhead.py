"""Times starting each command, and the part of a step that is neither generation nor training. See README.md."""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import machine

QUICKSTART = Path(__file__).parents[1] / "examples/quickstart/grpo.yaml"
ENGINES = "engines"
"""Label of the calls of backend and rollout."""
BOTH = (statistics.median, min)

Seconds = tuple[float, float]
"""CPU and wall."""


def run(command: list[str]) -> Seconds:
    """Seconds of a process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    wall = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    wall = time.perf_counter() - wall
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime - before.ru_utime) + (after.ru_stime - before.ru_stime), wall


def starts(rounds: int) -> list[str]:
    """A table of the commands' seconds, taken in turn; the first round, which fills caches, is left out."""
    program = str(Path(sys.executable).with_name("drivetrain"))
    commands = {
        "`python -c pass`": [sys.executable, "-c", "pass"],
        "`import torch`": [sys.executable, "-c", "import torch"],
        "`drivetrain --help`": [program, "--help"],
        "`drivetrain plugins`": [program, "plugins"],
        "`drivetrain config` (quickstart)": [program, "config", str(QUICKSTART)],
        "`drivetrain doctor`": [program, "doctor"],
    }
    taken: dict[str, list[Seconds]] = {name: [] for name in commands}
    for number in range(rounds + 1):
        for name, command in commands.items():
            seconds = run(command)
            if number:
                taken[name].append(seconds)
    rows = []
    for name, values in taken.items():
        cells = [f"{function(v[clock] for v in values):.3f}" for clock in (0, 1) for function in BOTH]
        rivals = (taken["`python -c pass`"], taken["`import torch`"])
        cells += [f"{statistics.median(a[0] / b[0] for a, b in zip(values, other)):.2f}" for other in rivals]
        rows.append([name, *cells])
    titles = ["command", *(f"{clock} s, {what}" for clock in ("CPU", "wall") for what in ("median", "min")),
              "CPU / `pass`", "CPU / `import torch`"]  # fmt: skip
    return machine.table(titles, rows)


def steps(rounds: int, warmup: int = 2) -> list[str]:
    """A table of where the seconds of a step go that no engine spends."""
    import torch
    from grpo_step import workload as work
    from grpo_step.drivetrain_step import trainer

    torch.set_num_threads(1)
    watch, step = work.Stopwatch(), None
    taken: list[dict[str, list[float]]] = []
    with tempfile.TemporaryDirectory() as name:
        work.write(Path(name))
        with trainer(Path(name)) as loop:
            session = loop.session
            worker = session.policy.worker  # type: ignore[attr-defined]
            for target, method, label in (
                (worker.rollout, "generate_batch", ENGINES), (worker.actor, "update", ENGINES),
                (session.policy, "call", "calls of workers"), (session.train_prompts, "next_batch", "prompts"),
                (session.rewards, "score", "rewards"), (loop.algorithm, "learn", "learn"),
                (loop.algorithm, "collect", "collect"),
            ):  # fmt: skip
                time_calls(watch, target, method, label)

            def stop() -> bool:
                nonlocal step
                if step is not None:
                    step.__exit__(None, None, None)
                    taken.append(watch.take())
                step = watch("step")
                step.__enter__()
                return len(taken) == warmup + rounds

            loop.train(stop)
    return driver_table([apart(seconds) for seconds in taken[warmup:]])


def time_calls(watch: Any, target: Any, method: str, label: str) -> None:
    """Add the seconds of every call of a method of this object to a label."""
    function = getattr(target, method)

    def call(*args: Any, **kwargs: Any) -> Any:
        with watch(label):
            return function(*args, **kwargs)

    setattr(target, method, call)


def apart(seconds: dict[str, list[float]]) -> dict[str, Seconds]:
    """From seconds of calls that contain one another to seconds of parts, which add up to the driver's."""
    parts: list[dict[str, float]] = []
    for clock in (1, 0):
        s = {label: pair[clock] for label, pair in seconds.items()}
        calls = s["collect"] + s["learn"]
        parts.append(
            {
                "step": s["step"],
                ENGINES: s[ENGINES],
                "driver": s["step"] - s[ENGINES],
                "prompts": s["prompts"],
                "requests, rows and dispatch": s["calls of workers"] - s[ENGINES],
                "rewards": s["rewards"],
                "algorithm: advantages, counts, metrics": calls - s["calls of workers"] - s["rewards"],
                "trainer and trackers": s["step"] - calls - s["prompts"],
            }
        )
    cpu, wall = parts
    return {label: (cpu[label], wall[label]) for label in cpu}


def driver_table(taken: list[dict[str, Seconds]]) -> list[str]:
    rows = []
    for label in taken[0]:
        cells = [f"{1000 * function(t[label][clock] for t in taken):.1f}" for clock in (0, 1) for function in BOTH]
        share = statistics.median(t[label][0] / t["step"][0] for t in taken)
        rows.append([label, *cells, f"{share:.2%}"])
    titles = ["part", *(f"{clock} ms, {what}" for clock in ("CPU", "wall") for what in ("median", "min")),
              "share of the step"]  # fmt: skip
    return machine.table(titles, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="starts of each command, and steps, that count")
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    options = parser.parse_args()
    about = {"threads": "1", "rounds": str(options.rounds),
             "versions": machine.versions("drivetrain-core", "torch", "transformers", "pydantic", "typer"),
             "step": "that of `grpo_cpu.py`: 256 completions of 64 tokens"}  # fmt: skip
    lines = [
        *machine.head("Overhead", about, ["--rounds", str(options.rounds)]),
        "", "## Starting a command", "", *starts(options.rounds),
        "", "## The driver's part of a step", "", *steps(options.rounds), "",
    ]  # fmt: skip
    print("\n".join(lines))
    if options.out:
        options.out.write_text("\n".join(lines))


if __name__ == "__main__":
    os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", CUDA_VISIBLE_DEVICES="")
    main()
