"""GRPO with a reward model that generates its verdict, from the command line.

The judge's verdict is one character, which follows from the last one of its question.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny

from drivetrain import RewardSample, Score
from drivetrain.builtin.local_executor import LocalWorkerGroup
from drivetrain.builtin.per_sample import SampleError
from drivetrain.config import JudgeConfig, ModelConfig, PluginConfig, RewardModelConfig
from drivetrain.driver.judging import GenerativeReward
from drivetrain.workers import GenerativeRewardWorker
from drivetrain_rollout_hf.config import HFRolloutConfig

SMALL = ["data.batch_prompts=20", "data.eval.limit=10", "algorithm.group_size=4", "trainer.steps=2"]
GRADES = {character: character if character.isdigit() else "0" for character in tiny.CHARACTERS}


def settings(folder: Path, says: dict[str, str] = GRADES, **judge: object) -> list[str]:
    """Grades of the last digit of a response, 0 where there is none."""
    speaker = tiny.write_speaker(folder / "speaker", says)
    judge = {"prompt": "{prompt}{answer}+{response}", "min": 0, "max": 9, **judge}
    return [*SMALL, f"reward_model.model.path={speaker}", f"reward_model.judge={json.dumps(judge)}",
            "reward_model.rollout={name: hf, max_response_tokens: 1, temperature: 0}"]  # fmt: skip


def metrics_of(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def grade(response: str) -> float:
    return float(GRADES[response[-1]]) if response else 0.0


def test_alone(tmp_path: Path, drivetrain) -> None:
    _, grpo = tiny.write_configs(tmp_path)
    run_dir = tmp_path / "run"
    out = drivetrain("train", grpo, *settings(tmp_path, correct_above=4), "rewards=[]", f"trainer.run_dir={run_dir}")
    assert "reward on cpu" in out.stdout and "derives from actor" not in out.stdout
    rows = metrics_of(run_dir)
    for row in rows[1:]:
        assert row["train/reward"] == row["train/reward/reward_model"] > 0
        assert row["train/grad_norm"] > 0 and 0 < row["train/accuracy"] < 1
    samples = [json.loads(line) for line in next(run_dir.glob("samples*")).read_text().splitlines()]
    samples = [sample for sample in samples if sample["step"] == 2]
    assert len(samples) == 10
    for sample in samples:
        assert sample["score"] == grade(sample["response"]), sample
        assert sample["correct"] == (sample["score"] > 4)
    [checkpoint] = run_dir.glob("checkpoints/step-*")
    assert not list(checkpoint.glob("*reward*"))
    report = json.loads(drivetrain("eval", run_dir, "--json").stdout)
    for name in ("eval/reward", "eval/reward/reward_model", "eval/accuracy"):
        assert report[name] == rows[-1][name]


def test_a_weighted_sum_with_a_rule_and_a_function_in_one_process_and_in_a_pool_of_its_own(
    tmp_path: Path, drivetrain
) -> None:
    _, grpo = tiny.write_configs(tmp_path)
    (tmp_path / "reward.py").write_text("def length(response):\n    return float(len(response))\n")
    rewards = ("rewards=[{name: exact_match, weight: 2.0}, "
               "{name: function, path: './reward.py:length', label: length, weight: -0.5}]")  # fmt: skip
    shared = [*settings(tmp_path), rewards, "reward_model.weight=0.25", "reward_model.label=judge",
              "trainer.steps=1"]  # fmt: skip
    drivetrain("train", grpo, *shared, f"trainer.run_dir={tmp_path / 'one'}")
    out = drivetrain("train", grpo, *shared, f"trainer.run_dir={tmp_path / 'two'}", "executor.name=ray",
                     "executor.num_cpus=3", "placement={pools: {policy: [1], judges: [2]}, "
                     "roles: {actor: policy, reward: judges}}")  # fmt: skip
    assert "reward on 2 x " in out.stdout
    one, two = (metrics_of(tmp_path / name)[1] for name in ("one", "two"))
    parts = {"exact_match": 2.0, "length": -0.5, "judge": 0.25}
    assert one["train/reward"] == pytest.approx(sum(w * one[f"train/reward/{n}"] for n, w in parts.items()), abs=1e-5)
    assert one["train/accuracy"] == pytest.approx(one["train/reward/exact_match"])  # the judge says nothing about it
    assert one["train/reward/judge"] > 0 and one["train/grad_norm"] > 0
    for name in ("train/reward", "train/reward/judge", "train/loss", "train/grad_norm"):
        assert two[name] == pytest.approx(one[name], rel=1e-5, abs=1e-6), name
    samples = [json.loads(line) for line in next((tmp_path / "two").glob("samples*")).read_text().splitlines()]
    for sample in samples:
        assert sample["score"] == pytest.approx(
            2.0 * sample["correct"] - 0.5 * len(sample["response"]) + 0.25 * grade(sample["response"])
        )


def test_a_sampled_verdict_is_drawn_until_it_says_a_number(tmp_path: Path) -> None:
    speaker = tiny.write_speaker(tmp_path, dict.fromkeys(tiny.CHARACTERS, "7,"))

    def judge(retries: int) -> list[Score]:
        section = RewardModelConfig(
            model=ModelConfig(path=speaker), rollout=HFRolloutConfig(name="hf", max_response_tokens=1),
            judge=JudgeConfig(prompt="{response}", verdict_retries=retries),
        )  # fmt: skip
        run = SimpleNamespace(reward_model=section, trainer=SimpleNamespace(seed=3), hardware=PluginConfig(name="cpu"))
        group = LocalWorkerGroup(GenerativeRewardWorker(run, "reward"))
        group.call("init_model")
        samples = [RewardSample(uid=character, prompt="", response=character, response_token_ids=[], answer=None,
                                finish_reason="stop", data_source="") for character in tiny.CHARACTERS]  # fmt: skip
        return list(GenerativeReward(group, section)(samples))

    assert judge(30) == [Score(7.0)] * len(tiny.CHARACTERS)
    with pytest.raises(SampleError):
        judge(0)


def test_a_verdict_that_says_no_number_stops_the_run(tmp_path: Path, drivetrain) -> None:
    _, grpo = tiny.write_configs(tmp_path)
    out = drivetrain("train", grpo, *settings(tmp_path, dict.fromkeys(tiny.CHARACTERS, ",")), code=1)
    assert "reward 'reward_model' raised ValueError: no number could be read from the verdict ','" in out.stderr
    assert "sample       prompt '" in out.stderr and "never counted as zero" in out.stderr


def test_a_folder_without_a_language_model_is_refused_before_the_first_step(tmp_path: Path, drivetrain) -> None:
    _, grpo = tiny.write_configs(tmp_path)
    classifier = tiny.write_judge(tmp_path / "judge")
    out = drivetrain("train", grpo, *settings(tmp_path), f"reward_model.model.path={classifier}", code=2)
    assert "lacks" in out.stderr and "(reward_model.model.path)" in out.stderr
