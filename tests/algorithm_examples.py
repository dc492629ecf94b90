"""The configs of examples/algorithms, trained on a CPU."""

from __future__ import annotations

import json
import math
from pathlib import Path

import yaml

from drivetrain.cli.main import run

ROOT = Path(__file__).parent.parent
EXAMPLES = {path.stem: path for path in sorted((ROOT / "examples" / "algorithms").glob("*.yaml"))}
HELD_OUT = 512


def lower_bound(accuracy: float, items: int = HELD_OUT, z: float = 1.96) -> float:
    """Of the 95 % interval of a share (Wilson, 1927)."""
    centre = accuracy + z * z / (2 * items)
    return (centre - z * math.sqrt(accuracy * (1 - accuracy) / items + z * z / (4 * items**2))) / (1 + z * z / items)


def train(name: str, run_dir: Path, *overrides: str) -> list[dict[str, float]]:
    """Train an example from the root, where its paths start; returns its lines of metrics."""
    fixed = ("hardware.name=cpu", "trackers=[{name: jsonl}]", f"trainer.run_dir={run_dir}")
    assert run(["train", str(EXAMPLES[name]), *fixed, *overrides]) == 0
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def assert_learns(name: str, run_dir: Path, *overrides: str, by: float = 0.10) -> None:
    """The lower bound of the held-out accuracy exceeds the start by that much."""
    steps = yaml.safe_load(EXAMPLES[name].read_text())["trainer"]["steps"]
    first, *_, last = train(name, run_dir, f"trainer.eval_every={steps}", *overrides)
    assert yaml.safe_load((run_dir / "config.yaml").read_text())["data"]["eval"]["size"] == HELD_OUT
    assert first["step"] == 0 and lower_bound(last["eval/accuracy"]) >= first["eval/accuracy"] + by
