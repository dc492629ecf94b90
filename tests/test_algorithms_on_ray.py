"""Algorithms learn on two processes as on one."""

from __future__ import annotations

from pathlib import Path

import pytest
from algorithm_examples import ROOT, assert_learns


@pytest.mark.parametrize("name", ["dapo", "ppo"])
def test_it_learns_on_two_processes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert_learns(name, tmp_path / "run", "executor={name: ray, processes: 2}", "hybrid_engine.name=colocated")
