"""PPO learns a tiny task from the command line, by the config of another algorithm."""

from __future__ import annotations

import json
from pathlib import Path

import tiny


def metrics_of(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_sft_then_ppo_learn(tmp_path: Path, drivetrain) -> None:
    sft, grpo = tiny.write_configs(tmp_path)
    drivetrain("train", sft)
    drivetrain("export", tmp_path / "runs/sft", tmp_path / "warm")
    run_dir = tmp_path / "runs/ppo"
    out = drivetrain(
        "train", grpo, "algorithm.name=ppo", f"model.path={tmp_path / 'warm'}", f"trainer.run_dir={run_dir}"
    )
    rows = metrics_of(run_dir)
    assert [row["step"] for row in rows] == list(range(41)) and "role critic derives from actor" in out.stdout
    # 100 prompts: three standard errors of a share are at most 0.15
    assert rows[-1]["eval/accuracy"] >= rows[0]["eval/accuracy"] + 0.2
    # the critic learns to tell answers that will be right from others
    assert sum(row["train/explained_variance"] for row in rows[-10:]) / 10 > 0.2
    [checkpoint] = run_dir.glob("checkpoints/step-*")
    assert {"actor", "critic"} <= {path.name for path in checkpoint.iterdir()}
    report = drivetrain("eval", run_dir, "--json")
    assert json.loads(report.stdout)["eval/accuracy"] == rows[-1]["eval/accuracy"]
