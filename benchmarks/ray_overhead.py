"""Times what a step costs on Ray beside the workers' compute and a plain copy of its bytes. See README.md."""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import machine

PROMPTS, SAMPLES = 128, 8
PROMPT_TOKENS, RESPONSE_TOKENS = 512, 512
BETWEEN = "advantages, metrics and the rest of the driver"
"""Label of what a step does outside calls of workers."""
SWITCHES = ("enter_generation", "enter_training")


@dataclass
class Cost:
    """Of a call, or of a step."""

    wall: float = 0.0  # seconds
    cpu: float = 0.0  # seconds of this process, all of its threads
    own: float = 0.0  # seconds of the slowest worker's own work
    workers_cpu: float = 0.0  # seconds of CPU, summed over worker processes
    bytes: float = 0.0
    transfer: float = 0.0  # seconds
    copy: float = 0.0  # seconds of a plain copy of the bytes

    def add(self, other: Cost) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    @property
    def overhead(self) -> float:
        return self.wall - self.own - self.copy


@dataclass
class Ledger:
    """Costs of the calls of one step, by method."""

    calls: dict[str, Cost] = field(default_factory=lambda: defaultdict(Cost))
    inside: Cost = field(default_factory=Cost)  # of all calls, what the step's own watch saw
    measuring: Cost = field(default_factory=Cost)  # of questions that no step asks


@contextmanager
def watched(cost: Cost) -> Iterator[None]:
    """Add seconds of wall and CPU."""
    wall, cpu = time.perf_counter(), time.process_time()
    try:
        yield
    finally:
        cost.wall += time.perf_counter() - wall
        cost.cpu += time.process_time() - cpu


class MeteredGroup:
    """A worker group whose calls are entered in a ledger."""

    def __init__(self, group: Any, ledger: Callable[[], Ledger]) -> None:
        self.group, self.ledger = group, ledger
        self.world_size = group.world_size

    def call(self, method: str, *args: Any) -> Any:
        ledger, cost = self.ledger(), Cost()
        with watched(ledger.measuring):
            ledger.calls[BETWEEN].add(self.moved())
            self.group.call("take_seconds")
            self.group.take_metrics()
        with watched(cost):
            result = self.group.call(method, *args)
        with watched(ledger.measuring):
            cost.add(self.moved())
            found = self.group.call("take_seconds")
            cost.own = max(rank["own"] for rank in found)
            cost.workers_cpu = sum(rank["cpu"] for rank in found)
            self.group.take_metrics()
        ledger.calls["switches" if method in SWITCHES else method].add(cost)
        ledger.inside.add(cost)
        return result

    def moved(self) -> Cost:
        metrics = self.group.take_metrics()
        return Cost(bytes=metrics["transfer/bytes"], transfer=metrics["transfer/s"])


class ConstantRewards:
    """The columns that rewards add, without judging."""

    def score(self, batch: Any) -> Any:
        import torch

        mask = batch["response_mask"].bool()
        scores = torch.arange(len(batch)).remainder(2).float()
        last = torch.zeros(mask.shape)
        last[torch.arange(len(batch)), mask.sum(dim=1) - 1] = scores
        return batch.with_columns(scores=scores, correct=scores, token_level_scores=last)


def prompts() -> Any:
    """Prompts of half to wholly full length, with the columns that the driver's prompts have."""
    import torch

    from drivetrain import DataProto

    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(PROMPT_TOKENS // 2, PROMPT_TOKENS + 1, (PROMPTS, 1), generator=draw)
    texts = [f"question {number}: " + "why? " * 300 for number in range(PROMPTS)]
    return DataProto.from_dict(
        {
            "input_ids": torch.randint(3, 32000, (PROMPTS, PROMPT_TOKENS), generator=draw),
            "attention_mask": (torch.arange(PROMPT_TOKENS) >= PROMPT_TOKENS - lengths).long(),
        },
        {
            "uid": [f"0-{number}" for number in range(PROMPTS)],
            "raw_prompt": texts,
            "messages": [[{"role": "user", "content": text}] for text in texts],
            "response_text": [None] * PROMPTS,
            "answer": [str(number) for number in range(PROMPTS)],
            "data_source": ["benchmark"] * PROMPTS,
            "extra": [{} for _ in range(PROMPTS)],
        },
    )


def config(folder: Path) -> Any:
    """A PPO run with a critic and a reference; its model is never loaded."""
    from drivetrain.config.resolve import load_config
    from drivetrain.seam.registry import get_registry

    (folder / "prompts.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    overrides = [
        f"model.path={folder}", f"algorithm={{name: ppo, group_size: {SAMPLES}, kl_coef: 0.1}}",
        "actor.backend.name=fsdp", "actor.optimizer={name: adamw, lr: 1.0e-6}",
        f"rollout={{name: hf, max_response_tokens: {RESPONSE_TOKENS}}}", f"data.batch_prompts={PROMPTS}",
        f"data.train={{name: jsonl, path: {folder}/prompts.jsonl}}", "rewards=[{name: exact_match}]",
        "hardware.name=cpu", f"trainer={{steps: 1000, run_dir: {folder}/run}}",
    ]  # fmt: skip
    return load_config(None, overrides, get_registry()).run


class Step:
    """One step of PPO, by the algorithm and the roles of a training run."""

    def __init__(self, group: Any, run: Any) -> None:
        from drivetrain.driver.phases import Phases
        from drivetrain.driver.progress import Progress
        from drivetrain.driver.roles import ActorRole, CriticRole, ReferenceRole, Roles, RolloutRole
        from drivetrain.seam.registry import resolve

        self.ledger = Ledger()
        policy: Any = MeteredGroup(group, lambda: self.ledger)
        progress = Progress()
        phases = Phases(lambda _: None, lambda side: self._switch(policy, side))
        rewards: Any = ConstantRewards()
        text: Any = None
        self.roles = Roles(
            actor=ActorRole(policy, phases, progress, run),
            text=text,
            rollout=RolloutRole(policy, phases, progress, 0),
            ref=ReferenceRole(policy, phases),
            critic=CriticRole(policy, phases, progress, run),
            rewards=rewards,
        )
        self.algorithm: Any = resolve("algorithms", run.algorithm.name)(run.algorithm)
        self.prompts, self.group = prompts(), group

    @staticmethod
    def _switch(policy: Any, side: str) -> Mapping[str, float]:
        found = policy.call(f"enter_{side}", *([0] if side == "generation" else []))
        return dict(found[0] if isinstance(found, list) else found)

    def take(self) -> Ledger:
        """Take a step; the ledger has the whole as ``step``."""
        from drivetrain.driver.stats import batch_metrics
        from drivetrain.metrics import to_floats

        self.ledger, step = Ledger(), Cost()
        with watched(step):
            batch = self.algorithm.collect(self.roles, self.prompts)
            batch_metrics(batch)
            to_floats(self.algorithm.learn(self.roles, batch))
        ledger = self.ledger
        metrics = self.group.take_metrics()
        between = ledger.calls[BETWEEN]
        between.bytes += metrics["transfer/bytes"]
        between.transfer += metrics["transfer/s"]
        between.wall = step.wall - ledger.inside.wall - ledger.measuring.wall
        between.cpu = step.cpu - ledger.inside.cpu - ledger.measuring.cpu
        return ledger


def plain_copy(count: float, workers: int) -> float:
    """Seconds to put that many bytes into the object store, in one part a worker, and to copy them out again."""
    import numpy as np
    import ray

    parts = [np.ones(int(count) // workers, dtype=np.uint8) for _ in range(workers)]
    start = time.perf_counter()
    for ref in [ray.put(part) for part in parts]:
        ray.get(ref).copy()
    return time.perf_counter() - start


def measure(workers: int, steps: int, warmup: int, profile: Path | None) -> list[dict[str, Cost]]:
    """The costs of some steps by part; the first ones, which fill caches, are left out."""
    from ray_step.worker import IdleWorker

    from drivetrain_executor_ray import Crew, RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

    crew, taken = Crew(), list[dict[str, Cost]]()
    profiler = cProfile.Profile()
    with tempfile.TemporaryDirectory() as folder:
        run = config(Path(folder))
        made = RayClassWithInitArgs(IdleWorker, config=run, role="idle", response_tokens=RESPONSE_TOKENS)
        try:
            group = RayWorkerGroup(RayResourcePool([workers], use_gpu=False), made, "idle", crew=crew)
            step = Step(group, run)
            for number in range(warmup + steps):
                if profile and number >= warmup:
                    profiler.enable()
                ledger = step.take()
                profiler.disable()
                for cost in ledger.calls.values():
                    cost.copy = plain_copy(cost.bytes / 2, workers) if cost.bytes else 0.0
                whole = Cost()
                for cost in ledger.calls.values():
                    whole.add(cost)
                if number >= warmup:
                    taken.append({**ledger.calls, "step": whole})
        finally:
            crew.end()
    if profile:
        profiler.dump_stats(profile)
        pstats.Stats(profiler).sort_stats("tottime").print_stats(35)
    return taken


def costs_table(taken: list[dict[str, Cost]]) -> list[str]:
    """Medians over steps, in milliseconds."""
    rows = []
    for label in taken[0]:
        costs = [costs[label] for costs in taken]

        def middle(name: str, costs: list[Cost] = costs) -> float:
            return statistics.median(getattr(cost, name) for cost in costs)

        seconds = [middle(name) for name in ("wall", "cpu", "workers_cpu", "own", "copy", "overhead")]
        least = min(cost.overhead for cost in costs)
        rows.append([label, f"{middle('bytes') / 2**20:.1f}", *(f"{1000 * s:.1f}" for s in [*seconds, least])])
    titles = ["part", "MiB", "wall", "driver CPU", "workers CPU, summed", "workers' own work", "copy of the bytes",
              "overhead", "overhead, least"]  # fmt: skip
    return machine.table(titles, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 2], help="processes, one measurement each")
    parser.add_argument("--steps", type=int, default=9, help="steps that count")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    parser.add_argument("--profile", type=Path, help="file for a profile of the driver; seconds are then too long")
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    options = parser.parse_args()
    import torch

    from drivetrain_executor_ray import ray_init

    torch.set_num_threads(1)
    leave = ray_init(num_cpus=max(options.workers))
    arguments = ["--workers", *map(str, options.workers), "--steps", str(options.steps)]
    about = {
        "step": f"PPO: {PROMPTS} prompts x {SAMPLES} samples, {PROMPT_TOKENS} + {RESPONSE_TOKENS} tokens wide",
        "threads": "1",
        "steps": f"{options.steps}, after {options.warmup} to warm up; medians in ms",
        "versions": machine.versions("drivetrain-core", "drivetrain-executor-ray", "ray", "torch", "numpy"),
    }
    lines = machine.head("What a step costs on Ray beside compute", about, arguments)
    try:
        for workers in options.workers:
            taken = measure(workers, options.steps, options.warmup, options.profile)
            lines += ["", f"## {workers} workers", "", *costs_table(taken)]
    finally:
        leave()
    text = "\n".join([*lines, ""])
    print(text)
    if options.out:
        options.out.write_text(text)


if __name__ == "__main__":
    os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", CUDA_VISIBLE_DEVICES="")
    main()
