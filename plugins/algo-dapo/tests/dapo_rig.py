"""DAPO on a tiny Llama whose answers are right by chance."""

from __future__ import annotations

import json
from pathlib import Path

from drivetrain import DataProto
from drivetrain.testing import tiny
from drivetrain.testing.tiny import config, distance, opened
from drivetrain.testing.tiny import judged_by as reward

__all__ = ["config", "distance", "opened", "reward"]

REWARDS = """
def seldom(response: str) -> bool:
    return response[-1:] in ("3", "7")

def always(response: str) -> bool:
    return True

def length(response: str) -> float:
    return len(response)
"""


def write_run(folder: Path) -> Path:
    """A run in which some of 24 prompts of unequal length have answers of both kinds."""
    path = tiny.write_run(folder, {"name": "dapo", "group_size": 3}, backend="fsdp", optimizer="adamw", rollout="hf",
                          judge=REWARDS, mini_batch_prompts=2, trackers=[{"name": "jsonl"}])  # fmt: skip
    prompts = [{"prompt": f"{7**n % 10 ** (n % 4 + 1)}="} for n in range(24)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    return path


def uids(batch: DataProto) -> list[str]:
    """The prompts of a batch, in order."""
    return list(dict.fromkeys(batch["uid"].tolist()))
