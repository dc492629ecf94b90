"""One Ray for all tests of a session."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """Ray with more CPUs than the machine may have."""
    from drivetrain_executor_ray import ray_init

    leave = ray_init(num_cpus=16)
    yield
    leave()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model."""
    from ray_rig import write_model

    folder = tmp_path_factory.mktemp("tiny")
    write_model(folder / "model")
    return folder


@pytest.fixture(scope="session")
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
