"""Times one GRPO step on a CPU: drivetrain, TRL's GRPOTrainer and a plain PyTorch loop, in turn. See README.md."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import machine
from grpo_step import workload as work

PHASES = ("generation", "training", "other", "step")
CLOCKS = ("CPU", "wall")
GOALS = (("TRL", "step", 0.55), ("plain", "generation", 1.0), ("plain", "training", 1.0))
"""drivetrain takes at most this share of that contender's phase."""

KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 32), "MALLOC_TRIM_THRESHOLD_": str(1 << 32)}
"""Lets glibc keep the memory of large tensors, which are else given back to the system and faulted in again."""

Rounds = list[dict[str, tuple[float, float]]]
"""Of each round, ``{phase: (CPU seconds, wall seconds)}``."""


class Contender:
    """A process that takes a step when it is told to."""

    def __init__(self, process: subprocess.Popen[str], errors: Path) -> None:
        self._process, self._errors = process, errors
        self.versions = self._read()
        self.peak_mib = 0.0
        self.rounds: Rounds = []

    def step(self, *, keep: bool) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        answer = self._read()
        self.peak_mib = answer["peak_mib"]
        if keep:
            seconds = {phase: (cpu, wall) for phase, (wall, cpu) in answer["seconds"].items()}
            cpu, wall = (2 * seconds["step"][i] - sum(s[i] for s in seconds.values()) for i in (0, 1))
            self.rounds.append({**seconds, "other": (cpu, wall)})

    def _read(self) -> Any:
        assert self._process.stdout is not None
        text = self._process.stdout.readline()
        if not text:
            raise SystemExit(f"{self._errors.stem} ended:\n{self._errors.read_text()[-2000:]}")
        return json.loads(text)


@contextmanager
def contender(
    name: str, python: str, module: str, folder: Path, *arguments: str, keep_memory: bool
) -> Iterator[Contender]:
    """Start a contender on one thread, without a network."""
    environment = {
        **os.environ, "PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "",
        **(KEEP_MEMORY if keep_memory else {}),
    }  # fmt: skip
    errors = folder / f"{name}.stderr"
    with errors.open("w") as file:
        command = [python, "-m", f"grpo_step.{module}", str(folder), *arguments]
        process = subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file,
                                   env=environment)  # fmt: skip
    try:
        yield Contender(process, errors)
    finally:
        process.kill()
        process.communicate()


def measure(
    trl_python: str | None, rounds: int, warmup: int, overrides: Sequence[str], keep_memory: bool
) -> dict[str, Contender]:
    """Let all take a step in turn, each round beginning with another one."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        work.write(folder)

        def start(*words: Any) -> Contender:
            return stack.enter_context(contender(*words, keep_memory=keep_memory))

        options = json.dumps({"overrides": overrides})
        found = {"drivetrain": start("drivetrain", sys.executable, "drivetrain_step", folder, options),
                 "plain": start("plain", sys.executable, "plain_step", folder)}  # fmt: skip
        if trl_python:
            found["TRL"] = start("TRL", trl_python, "trl_step", folder)
        everyone = list(found.values())
        for number in range(warmup + rounds):
            first = number % len(everyone)
            for each in everyone[first:] + everyone[:first]:
                each.step(keep=number >= warmup)
            print(f"round {number + 1} of {warmup + rounds}", file=sys.stderr, flush=True)
        return found


def seconds_table(found: dict[str, Contender]) -> list[str]:
    """Median and least seconds of each phase."""
    rows = []
    for name, each in found.items():
        for phase in PHASES:
            cells = []
            for clock in range(2):
                values = [taken[phase][clock] for taken in each.rounds]
                cells += [f"{statistics.median(values):.3f}", f"{min(values):.3f}"]
            rows.append([name, phase, *cells])
    titles = ["", "phase", *(f"{clock} s, {what}" for clock in CLOCKS for what in ("median", "min"))]
    return machine.table(titles, rows)


def ratio(found: dict[str, Contender], rival: str, phase: str, clock: int) -> tuple[float, float]:
    """Of drivetrain's seconds to the rival's: the median over rounds, and that of the least seconds."""
    ours, theirs = ([taken[phase][clock] for taken in found[name].rounds] for name in ("drivetrain", rival))
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True)), min(ours) / min(theirs)


def ratios_table(found: dict[str, Contender]) -> list[str]:
    """drivetrain's seconds as a share of the others', and the goals."""
    goal = {(rival, phase): limit for rival, phase, limit in GOALS}
    rows = []
    for rival in [name for name in found if name != "drivetrain"]:
        for phase in ("generation", "training", "step"):
            numbers = [number for clock in range(2) for number in ratio(found, rival, phase, clock)]
            limit = goal.get((rival, phase))
            verdict = "" if limit is None else f"at most {limit}: {'met' if numbers[0] <= limit else 'MISSED'}"
            rows.append([f"drivetrain / {rival}", phase, *(f"{number:.3f}" for number in numbers), verdict])
    titles = ["", "phase", *(f"{clock}, {what}" for clock in CLOCKS for what in ("median", "of min")), "goal"]
    return machine.table(titles, rows)


def profile_table(overrides: Sequence[str], keep_memory: bool) -> list[str]:
    """Where drivetrain's time goes, by torch's profiler over one step."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        work.write(folder)
        options = json.dumps({"overrides": overrides, "profile": True})
        with contender(
            "drivetrain", sys.executable, "drivetrain_step", folder, options, keep_memory=keep_memory
        ) as each:
            for _ in range(3):
                each.step(keep=False)
        profile = json.loads((folder / "profile.json").read_text())
    rows = []
    for phase, ops in profile.items():
        total = sum(seconds for _, seconds, _ in ops)
        rows += [[phase, op, str(calls), f"{seconds:.3f}", f"{seconds / total:.0%}"] for op, seconds, calls in ops]
    return machine.table(["phase", "operation", "calls", "wall s in itself", "share of phase"], rows)


def report(found: dict[str, Contender], arguments: Sequence[str]) -> list[str]:
    """The file of results."""
    rows = work.PROMPTS * work.SAMPLES
    shape = (f"Qwen2 shape: {work.LAYERS} layers, hidden {work.HIDDEN}, {work.HEADS} heads, {work.KEY_HEADS} KV "
             f"heads, vocabulary {work.VOCABULARY}; float32")  # fmt: skip
    step = (f"{work.PROMPTS} prompts of {work.PROMPT_TOKENS} tokens x {work.SAMPLES} = {rows} completions of exactly "
            f"{work.RESPONSE_TOKENS} tokens, one update, no KL")  # fmt: skip
    about = {"model": shape, "step": step, "threads": "1 a process",
             "rounds": str(len(found["drivetrain"].rounds))}  # fmt: skip
    for name, each in found.items():
        about[name] = ", ".join(f"{what} {version}" for what, version in each.versions.items())
        about[name] += f"; peak memory {each.peak_mib:.0f} MiB"
    return [
        *machine.head("One GRPO step on a CPU", about, arguments),
        "", "## Seconds", "", *seconds_table(found), "", "## Ratios", "", *ratios_table(found), "",
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trl-python", help="Python that has TRL; without it TRL is left out")
    parser.add_argument("--rounds", type=int, default=7, help="steps of each that count")
    parser.add_argument("--warmup", type=int, default=2, help="steps of each before those")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE",
                        help="over drivetrain's config, such as algorithm.old_log_probs=recompute")  # fmt: skip
    parser.add_argument("--keep-memory", action="store_true",
                        help="let every contender's malloc keep the memory of large tensors")  # fmt: skip
    parser.add_argument("--profile", action="store_true", help="add where drivetrain's time goes")
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    options = parser.parse_args()
    trl_python = options.trl_python
    if trl_python is None or not Path(trl_python).exists():
        print(f"TRL is skipped: {'no --trl-python' if trl_python is None else f'{trl_python} does not exist'}")
        trl_python = None
    shown = ["--rounds", str(options.rounds), "--warmup", str(options.warmup)] + (
        ["--trl-python", "PYTHON"] if trl_python else []
    )
    shown += [word for override in options.set for word in ("--set", override)]
    shown += ["--keep-memory"] if options.keep_memory else []
    shown += ["--profile"] if options.profile else []
    lines = report(measure(trl_python, options.rounds, options.warmup, options.set, options.keep_memory), shown)
    if options.profile:
        lines += ["## Where drivetrain's time goes", "", *profile_table(options.set, options.keep_memory), ""]
    print("\n".join(lines))
    if options.out:
        options.out.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
