"""A registry of little distributions, a config that selects them, and a session without models."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import yaml
from little_distributions import Site

from drivetrain.config import RunConfig
from drivetrain.config.resolve import load_config
from drivetrain.driver.phases import Phases
from drivetrain.driver.progress import Progress
from drivetrain.metrics import Mean
from drivetrain.protocol import DataProto
from drivetrain.seam.registry import get_registry

PLUGIN = """
    from drivetrain import AlgorithmSpec, BackendSpec, OptimizerSpec, RolloutSpec, hookimpl

    @hookimpl
    def drivetrain_algorithms():
        yield AlgorithmSpec(name="count", summary="", factory="{package}.work:Count")

    @hookimpl
    def drivetrain_backends():
        can = ("backend.live_module", "backend.snapshot")
        yield BackendSpec(name="none", summary="", factory="no:no", provides=can)

    @hookimpl
    def drivetrain_rollouts():
        yield RolloutSpec(name="none", summary="", factory="no:no", provides=("rollout.live_module",))

    @hookimpl
    def drivetrain_optimizers():
        yield OptimizerSpec(name="none", summary="", factory="no:no")
"""
COUNT = """
    from drivetrain import Algorithm
    from drivetrain.metrics import Mean

    class Count(Algorithm):
        total = 0

        def collect(self, roles, prompts):
            return prompts

        def learn(self, roles, batch):
            self.total += len(batch)
            return {"total": Mean(self.total, 1)}

        def state_dict(self):
            return {"total": self.total}

        def load_state_dict(self, state):
            self.total = state["total"]
"""
RUN = {
    "model": {"path": "model"},
    "algorithm": {"name": "count"},
    "actor": {"backend": {"name": "none"}, "optimizer": {"name": "none", "lr": 1.0}},
    "rollout": {"name": "none", "max_response_tokens": 4},
    "data": {"batch_prompts": 2, "train": {"name": "jsonl", "path": "train.jsonl"}},
    "rewards": [{"name": "exact_match"}],
    "trainer": {"steps": 4},
}


class Little:
    """Little distributions as all that is installed besides core."""

    def __init__(self, folder: Path) -> None:
        self.site = Site(folder)
        self.add("acme-count", PLUGIN, {"work.py": COUNT})

    def add(self, distribution: str, plugin: str, files: Mapping[str, str] | None = None) -> str:
        """Install a distribution; returns the name of its package."""
        package = self.site.add(distribution, plugin, files=files)
        get_registry.cache_clear()
        return package

    @staticmethod
    def module(name: str) -> Any:
        return importlib.import_module(name)

    def config(self, *overrides: str, path: Path | None = None) -> RunConfig:
        if path is None:
            path = self.site.folder.parent / "run.yaml"
            path.write_text(yaml.safe_dump(RUN))
        return load_config(path, overrides, get_registry()).run


class Prompts:
    """Counts the batches that it gave."""

    position = 0

    def next_batch(self, prompts: int) -> DataProto:
        self.position += prompts
        return DataProto.from_dict({"response_mask": torch.ones(prompts, 3, dtype=torch.long)})

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.position = state["position"]


class NoModels(SimpleNamespace):
    """As much of a session as the trainer touches, with a file in place of models."""

    def __init__(self, run: RunConfig) -> None:
        super().__init__(
            run=run, progress=Progress(), train_prompts=Prompts(), eval_prompts=None, roles=None,
            phases=phases(), policy=SimpleNamespace(world_size=1),
        )  # fmt: skip

    def start_profile(self) -> None: ...

    def stop_profile(self) -> None: ...

    def save_models(self, folder: Path, background: bool = False) -> None:
        (folder / "model").write_text(str(self.progress.step))

    def load_models(self, folder: Path) -> None:
        self.loaded = (folder / "model").read_text()


class Group:
    """A worker group that keeps its calls and answers each from a table of functions."""

    world_size = 1

    def __init__(self, **answers: Any) -> None:
        self.answers, self.calls = answers, []

    def call(self, method: str, *args: Any) -> Any:
        self.calls.append((method, *args))
        return self.answers[method](*args)


def mean(value: float) -> dict[str, Mean]:
    return {"loss": Mean(value, 1)}


def phases() -> Phases:
    """Phases that nobody listens to."""
    return Phases(lambda _: None, lambda side: {})
