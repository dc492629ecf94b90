"""One Ray for all tests of a session."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

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
