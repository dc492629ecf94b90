"""The quickstart's config on two tensor ranks of Megatron, by the command of the README."""

from __future__ import annotations

import json
from pathlib import Path

COMMAND = ("train examples/quickstart/grpo.yaml executor.name=ray executor.processes=2 actor.backend.name=megatron"
           " actor.backend.tensor_model_parallel_size=2 trainer.steps=3")  # fmt: skip
ROOT = Path(__file__).parent.parent


def test_the_quickstart_trains_with_megatron(tmp_path: Path, drivetrain) -> None:
    readme = (ROOT / "plugins" / "backend-megatron" / "README.md").read_text()
    assert f"drivetrain {COMMAND}" in " ".join(readme.replace("\\\n", " ").split())
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    done = drivetrain(*COMMAND.split())
    assert "placement: actor + rollout on 2 x cpu" in done.stdout and "3 of 3 steps" in done.stdout
    rows = [json.loads(line) for line in (tmp_path / "runs/quickstart/metrics.jsonl").read_text().splitlines()]
    begun, *steps = rows
    assert [row["step"] for row in steps] == [1, 2, 3]
    for row in steps:
        assert 0 < row["train/grad_norm"] < 10 and 0 < row["train/reward"] < 1
        assert row["train/ratio_max"] - 1 < 1e-4, "the rollout's log-probs are those of the weights that are trained"
    assert 0.3 < begun["eval/accuracy"] < 0.4
