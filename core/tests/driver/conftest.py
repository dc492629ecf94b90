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
def little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Little]:
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    with only_installed(folder):
        made = Little(folder)
        yield made
    made.site.forget()
