"""A run folder's ingredients, written once; the rig is that of drivetrain-algo-dpo."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parents[2] / "algo-dpo" / "tests"))

import dpo_rig


@pytest.fixture(scope="session")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Responses of the data, one of them longer than what the rollout may draw, and no rewards."""
    path = dpo_rig.write_run(tmp_path_factory.mktemp("spin"))
    texts = [("1=", "12"), ("23=", "45670123"), ("456=", "8"), ("7890=", "123")]
    (path.parent / "texts.jsonl").write_text("".join(json.dumps({"prompt": p, "text": t}) + "\n" for p, t in texts))
    run = yaml.safe_load(path.read_text())
    del run["ref"], run["rewards"]
    run["algorithm"] = {"name": "spin", "beta": 0.5}
    run["data"]["train"] = {"name": "jsonl", "path": str(path.parent / "texts.jsonl"), "answer_key": None,
                            "response_key": "text"}  # fmt: skip
    path.write_text(yaml.safe_dump(run))
    return path
