"""A run folder's ingredients, written once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import dpo_rig


@pytest.fixture(scope="session")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dpo_rig.write_run(tmp_path_factory.mktemp("dpo"))
