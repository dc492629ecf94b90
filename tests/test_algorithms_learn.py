"""Algorithms that are driven by rewards learn the task of the quickstart from its warm start."""

from __future__ import annotations

from pathlib import Path

import pytest
from algorithm_examples import ROOT, assert_learns


@pytest.mark.parametrize("name", ["dapo", "ppo", "opo", "sppo", "online_dpo"])
def test_it_learns(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert_learns(name, tmp_path / "run")
