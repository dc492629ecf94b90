"""The step as drivetrain takes it: a config, a session and its trainer, with a reward and a tracker."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml

import drivetrain
from drivetrain.config.resolve import load_config
from drivetrain.driver import run_folder
from drivetrain.driver.session import Session
from drivetrain.driver.tracking import Tracking
from drivetrain.driver.trainer import Trainer
from drivetrain.seam.registry import get_registry
from grpo_step import workload as work

PHASE_OF = {"generate_sequences": "generation", "compute_log_prob": "training", "update_actor": "training"}
"""Phases of the methods of the policy's worker."""


def config(folder: Path) -> dict[str, Any]:
    """The run, on what :func:`workload.write` wrote."""
    return {
        "model": {"path": str(folder / "model")},
        "algorithm": {"name": "grpo", "group_size": work.SAMPLES, "old_log_probs": "rollout"},
        "actor": {"backend": {"name": "fsdp"}, "optimizer": {"name": "adamw", "lr": work.LEARNING_RATE}},
        "rollout": {"name": "hf", "max_response_tokens": work.RESPONSE_TOKENS, "ignore_eos": True},
        "data": {
            "batch_prompts": work.PROMPTS,
            "train": {"name": "jsonl", "path": str(folder / "prompts.jsonl"), "answer_key": None},
        },
        "rewards": [{"name": "function", "path": f"{work.__file__}:digit_share"}],
        "hardware": {"name": "cpu"},
        "trackers": [{"name": "jsonl"}],
        "trainer": {"steps": 1_000_000, "run_dir": str(folder / "run")},
    }


@contextmanager
def trainer(folder: Path, overrides: Sequence[str] = ()) -> Iterator[Trainer]:
    """A trainer whose session is open; overrides are ``section.key=value``, as on the command line."""
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config(folder)))
    run = load_config(path, overrides, get_registry()).run
    run_folder.prepare(run.trainer.run_dir, resuming=False, overwrite=True)
    tracking = Tracking(run)
    with Session(run, announce=tracking.phase) as session:
        tracking.progress = session.progress
        yield Trainer(session, tracking, run.trainer.run_dir)


def profiled(call: Callable[[], Any], most: int = 9) -> tuple[Any, list[tuple[str, float, int]]]:
    """The result of a call, and its operations: name, wall seconds in the operation itself, number of calls.

    What Python and the profiler itself take between operations comes last.
    """
    wall = time.perf_counter()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        result = call()
        wall = time.perf_counter() - wall
    every = sorted(((e.key, e.self_cpu_time_total / 1e6, e.count) for e in profiler.key_averages()),
                   key=lambda row: -row[1])  # fmt: skip
    rest = every[most:]
    named = [*every[:most], ("other operations", sum(row[1] for row in rest), sum(row[2] for row in rest))]
    return result, [*named, ("outside of operations", max(0.0, wall - sum(row[1] for row in every)), 1)]


def main(folder: Path, overrides: Sequence[str] = (), profile: bool = False) -> None:
    torch.set_num_threads(1)
    watch, step = work.Stopwatch(), None
    profiles: dict[str, Any] = {}
    with trainer(folder, overrides) as loop:
        policy = loop.session.policy
        plain_call = policy.call

        def call(method: str, *args: Any, **kwargs: Any) -> Any:
            if method not in PHASE_OF:
                return plain_call(method, *args, **kwargs)
            with watch(PHASE_OF[method]):
                if not profile:
                    return plain_call(method, *args, **kwargs)
                result, profiles[method] = profiled(lambda: plain_call(method, *args, **kwargs))
                return result

        policy.call = call  # type: ignore[method-assign]
        line = work.Line(drivetrain=drivetrain.__version__, torch=torch.__version__,
                         transformers=transformers.__version__)  # fmt: skip

        def stop() -> bool:
            """Asked by the trainer before the first step and after each one."""
            nonlocal step
            if step is not None:
                step.__exit__(None, None, None)
                (folder / "profile.json").write_text(json.dumps(profiles))
                line.answer(watch.take())
            if not line.wait():
                return True
            step = watch("step")
            step.__enter__()
            return False

        loop.train(stop)


if __name__ == "__main__":
    main(Path(sys.argv[1]), **(json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}))
