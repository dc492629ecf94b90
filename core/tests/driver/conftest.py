"""Plugins of these tests are little distributions, seen without what else the machine has installed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "seam"))
sys.path.insert(0, str(Path(__file__).parent))

from driver_rig import Little
from only_installed import only_installed


@pytest.fixture
def little(tmp_path: Path) -> Iterator[Little]:
    with only_installed(tmp_path / "site"):
        made = Little(tmp_path / "site")
        yield made
        made.site.forget()
