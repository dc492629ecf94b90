"""GRPO with a reward model from the command line: alone, beside a rule, resumed, and when it fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

SMALL = ["data.batch_prompts=20", "data.eval.limit=10", "algorithm.group_size=4", "trainer.steps=3"]


def settings(folder: Path, **more: object) -> list[str]:
    judge = tiny.write_judge(folder / "judge")
    return [*SMALL, f"reward_model.model.path={judge}", "reward_model.label_index=1",
            *(f"reward_model.{key}={value}" for key, value in more.items())]  # fmt: skip


def metrics_of(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def probability(judge: Path, text: str) -> float:
    """That of label 1, by a plain call."""
    model = AutoModelForSequenceClassification.from_pretrained(judge)
    with torch.no_grad():
        return float(model(**AutoTokenizer.from_pretrained(judge)(text, return_tensors="pt")).logits.softmax(1)[0, 1])


def test_alone(tmp_path: Path, drivetrain) -> None:
    _, grpo = tiny.write_configs(tmp_path)
    run_dir = tmp_path / "run"
    out = drivetrain("train", grpo, *settings(tmp_path, output="probability"), "rewards=[]",
                     f"trainer.run_dir={run_dir}")  # fmt: skip
    assert "reward_model.backend derives from actor" in out.stdout and "reward on cpu" in out.stdout
    rows = metrics_of(run_dir)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    for row in rows[1:]:
        assert row["train/reward"] == row["train/reward/reward_model"] and 0 < row["train/reward"] < 1
        assert row["train/grad_norm"] > 0 and "train/accuracy" not in row
    last = rows[-1]
    assert last["eval/reward"] == last["eval/reward/reward_model"] and "eval/accuracy" not in last
    [checkpoint] = run_dir.glob("checkpoints/step-*")
    assert not list(checkpoint.glob("*reward*"))
    report = json.loads(drivetrain("eval", run_dir, "--json").stdout)
    assert report["eval/reward"] == last["eval/reward"]
    said = drivetrain("generate", run_dir, "--prompt", "1,4=", "--temperature", "0", "reward_model.model.path=gone")
    assert said.stdout.startswith("1,4=")  # nothing is scored, so no reward model is loaded
    samples = [json.loads(line) for line in next(run_dir.glob("samples*")).read_text().splitlines()]
    samples = [sample for sample in samples if sample["step"] == 3]
    assert len(samples) == 10
    for sample in samples:
        assert sample["score"] == pytest.approx(probability(tmp_path / "judge", sample["prompt"] + sample["response"]),
                                                abs=1e-6)  # fmt: skip
        assert sample["correct"] is None


def test_beside_a_rule_and_resumed(tmp_path: Path, drivetrain) -> None:
    _, grpo = tiny.write_configs(tmp_path)
    more = settings(tmp_path, output="log_odds", weight=0.5, label="judge")
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    drivetrain("train", grpo, *more, f"trainer.run_dir={whole}")
    rows = metrics_of(whole)
    for row in rows[1:]:
        parts = row["train/reward/exact_match"] + 0.5 * row["train/reward/judge"]
        assert row["train/reward"] == pytest.approx(parts, abs=1e-5)
        assert row["train/accuracy"] == pytest.approx(row["train/reward/exact_match"])
    drivetrain("train", grpo, *more, f"trainer.run_dir={broken}", "trainer.steps=1")
    drivetrain("train", grpo, *more, f"trainer.run_dir={broken}", "--resume", "auto")
    resumed = {row["step"]: row for row in metrics_of(broken)}
    for row in rows[2:]:
        for name, value in row.items():
            if not name.startswith(("time/", "throughput/")):
                assert resumed[row["step"]][name] == value, name


def test_a_score_that_is_not_finite_stops_the_run(tmp_path: Path, drivetrain) -> None:
    _, grpo = tiny.write_configs(tmp_path)
    more = settings(tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "judge")
    with torch.no_grad():
        model.classifier.bias[1] = torch.nan
    model.save_pretrained(tmp_path / "judge")
    out = drivetrain("train", grpo, *more, code=1)
    assert "reward 'reward_model' returned nan, which is not finite" in out.stderr
    assert "never counted as zero" in out.stderr


def test_a_long_text_and_a_slow_model_stop_the_run(tmp_path: Path, drivetrain) -> None:
    _, grpo = tiny.write_configs(tmp_path)
    out = drivetrain("train", grpo, *settings(tmp_path, max_tokens=6), code=1)
    assert "reward 'reward_model' raised UserError" in out.stderr and "the reward model reads 6" in out.stderr
    out = drivetrain("train", grpo, *settings(tmp_path, timeout_s=1e-6), "--overwrite", code=1)
    assert "took longer than timeout_s=1e-06" in out.stderr


def test_what_is_wrong_is_said_before_the_first_step(tmp_path: Path, drivetrain) -> None:
    _, grpo = tiny.write_configs(tmp_path)
    more = settings(tmp_path)
    assert "rewards are missing" in drivetrain("train", grpo, "rewards=[]", code=2).stderr
    out = drivetrain("train", grpo, *more, "reward_model.label_index=2", code=2)
    assert "has 2 labels; there is no label 2" in out.stderr
    out = drivetrain("train", grpo, *more, f"reward_model.model.path={tmp_path / 'model'}", "--overwrite", code=2)
    assert "LlamaForCausalLM, which has no classification head" in out.stderr


def test_two_processes_judge_as_one_does(tmp_path: Path, drivetrain) -> None:
    _, grpo = tiny.write_configs(tmp_path)
    shared = [*settings(tmp_path), "rewards=[]", "trainer.steps=1", "hybrid_engine.name=colocated"]
    drivetrain("train", grpo, *shared, f"trainer.run_dir={tmp_path / 'one'}")
    out = drivetrain("train", grpo, *shared, f"trainer.run_dir={tmp_path / 'two'}", "executor.name=ray",
                     "executor.processes=2")  # fmt: skip
    assert "reward on 2 x " in out.stdout
    one, two = (metrics_of(tmp_path / name)[1] for name in ("one", "two"))
    for name in ("train/reward", "train/loss", "train/grad_norm"):
        assert two[name] == pytest.approx(one[name], rel=1e-5, abs=1e-6), name
    assert one["train/grad_norm"] > 0
