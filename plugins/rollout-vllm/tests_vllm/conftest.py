"""Engines that serve a model for all tests: each takes seconds to start."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)

from rig_vllm import FAMILIES, Served, write_model


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of models by family."""
    folder = tmp_path_factory.mktemp("models")
    return {family: write_model(folder / family, family) for family in FAMILIES}


@pytest.fixture(scope="session")
def engines(models: dict[str, Path]) -> Iterator[dict[str, Served]]:
    """One for each model."""
    made = {family: Served(folder) for family, folder in models.items()}
    yield made
    for served in reversed(made.values()):
        served.engine.close()


@pytest.fixture(params=FAMILIES)
def served(request: pytest.FixtureRequest, engines: dict[str, Served]) -> Served:
    """Each engine, with the weights of its folder."""
    ready = engines[request.param]
    ready.engine.wake()
    ready.load(0)
    return ready


@pytest.fixture
def llama(engines: dict[str, Served]) -> Served:
    """One of them, where the model makes no difference."""
    engines["llama"].engine.wake()
    engines["llama"].load(0)
    return engines["llama"]
