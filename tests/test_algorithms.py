"""Every example of an algorithm runs; every algorithm learns the task of the quickstart from its warm start."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import yaml

from drivetrain.cli.main import run
from drivetrain.seam.registry import get_registry

ROOT = Path(__file__).parent.parent
EXAMPLES = {path.stem: path for path in sorted((ROOT / "examples" / "algorithms").glob("*.yaml"))}
HELD_OUT = 512
#: how far the lower bound of the held-out accuracy has to rise above the start
LEARN = dict.fromkeys(("dapo", "ppo", "grpo", "opo", "online_dpo", "sppo", "spin", "dpo"), 0.10)
TWO_PROCESSES = ("dapo", "ppo")


def lower_bound(accuracy: float, items: int = HELD_OUT, z: float = 1.96) -> float:
    """Of the 95 % interval of a share (Wilson, 1927)."""
    centre = accuracy + z * z / (2 * items)
    return (centre - z * math.sqrt(accuracy * (1 - accuracy) / items + z * z / (4 * items**2))) / (1 + z * z / items)


def train(name: str, run_dir: Path, *overrides: str) -> list[dict[str, float]]:
    """Train an example; returns its lines of metrics."""
    fixed = ("hardware.name=cpu", "trackers=[{name: jsonl}]", f"trainer.run_dir={run_dir}")
    assert run(["train", str(EXAMPLES[name]), *fixed, *overrides]) == 0
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(autouse=True)
def _from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # where the paths of the examples start


@pytest.mark.parametrize("name", LEARN)
def test_it_learns(name: str, tmp_path: Path) -> None:
    first, *_, last = train(name, tmp_path / "run")
    assert yaml.safe_load((tmp_path / "run/config.yaml").read_text())["data"]["eval"]["size"] == HELD_OUT
    assert lower_bound(last["eval/accuracy"]) >= first["eval/accuracy"] + LEARN[name]


@pytest.mark.parametrize("name", TWO_PROCESSES)
def test_it_learns_on_two_processes(name: str, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    ray = ("executor={name: ray, processes: 2}", "hybrid_engine.name=colocated")
    first, *_, last = train(name, tmp_path / "run", *ray)
    assert lower_bound(last["eval/accuracy"]) >= first["eval/accuracy"] + LEARN[name]


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
