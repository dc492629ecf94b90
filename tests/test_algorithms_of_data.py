"""Algorithms that learn from texts alone, and examples of everything that can be chosen."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from algorithm_examples import EXAMPLES, ROOT, assert_learns, train

from drivetrain.seam.registry import get_registry


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("name", ["spin", "dpo"])
def test_it_learns(name: str, tmp_path: Path) -> None:
    """Their own measure is the held-out accuracy too, which neither is ever told."""
    assert_learns(name, tmp_path / "run")


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_runs(name: str, tmp_path: Path) -> None:
    rows = train(name, tmp_path / "run", "trainer.steps=2", "data.eval=null", "trainer.eval_every=0")
    assert rows[-1]["step"] == 2
    assert all(math.isfinite(value) for row in rows for value in row.values())


def test_everything_that_can_be_chosen_has_an_example() -> None:
    """An algorithm, an estimator or a policy loss by its name; but for defaults of an algorithm of another name."""
    registry = get_registry()
    hooks = ("algorithms", "advantage_estimators", "policy_losses")
    offered = {name for hook in hooks for name in registry.names(hook)}
    defaults, terms = {"gae", "clip", "policy_gradient"}, {"kl", "entropy", "value_clip", "nll"}
    assert offered - set(EXAMPLES) == defaults | terms
