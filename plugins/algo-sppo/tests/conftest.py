"""A run folder's ingredients, written once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import sppo_rig


@pytest.fixture(scope="session")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sppo_rig.write_run(tmp_path_factory.mktemp("sppo"))
