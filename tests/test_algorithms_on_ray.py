"""An algorithm learns on two processes as on one."""

from __future__ import annotations

from pathlib import Path

import pytest
from algorithm_examples import ROOT, assert_learns


def test_dapo_learns_on_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of prompts, and groups that are dropped; that PPO's numbers are the same is in test_ray_equivalence."""
    monkeypatch.chdir(ROOT)
    assert_learns("dapo", tmp_path / "run", "executor={name: ray, processes: 2}", "hybrid_engine.name=colocated")
