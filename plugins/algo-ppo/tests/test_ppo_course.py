"""What PPO does over the steps of a run: the KL controller, the critic's head start, resuming."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ppo_rig as rig
import pytest

from drivetrain.cli.main import run
from drivetrain.driver import checkpoints
from drivetrain_algo_ppo.kl_control import KLController

ADAPTIVE = ["algorithm.kl_controller=adaptive", "algorithm.target_kl=0.5", "algorithm.kl_horizon=40"]


def test_the_adaptive_coefficient_is_that_of_the_paper() -> None:
    controller = KLController(0.2, target=6.0, horizon=100)
    value = 0.2
    for kl, completions in [(6.3, 10), (60.0, 10), (0.0, 20), (6.0, 50)]:
        controller.update(kl, completions)
        value *= 1 + max(-0.2, min(0.2, (kl - 6.0) / 6.0)) * completions / 100
        assert controller.value == pytest.approx(value, rel=1e-12)
    assert controller.value == pytest.approx(0.2 * 1.005 * 1.02 * 0.96)


def test_a_fixed_coefficient_stays() -> None:
    controller = KLController(0.2)
    controller.update(100.0, 1000)
    assert controller.value == 0.2


def test_the_coefficient_of_a_step_is_charged_and_then_steered(run_file: Path) -> None:
    with rig.opened(run_file, *rig.kl_options(run_file), *ADAPTIVE, "algorithm.kl_kind=k2") as made:
        batch = made.collect()
        made.learn(batch)
        kl = (batch["old_log_probs"] - batch["ref_log_probs"]).square() / 2 * batch["response_mask"]
        error = max(-0.2, min(0.2, float(kl.sum(1).mean()) / 0.5 - 1))
        assert made.metrics["kl_coef"] == 0.1
        assert made.metrics["kl"] == pytest.approx(float(kl.sum() / batch["response_mask"].sum()), rel=1e-5)
        assert made.algorithm.kl_ctrl.value == pytest.approx(0.1 * (1 + error * 8 / 40)) != 0.1
        again = made.algorithm.collect(made.roles, made.session.train_prompts.next_batch(4))
    charged = again["token_level_scores"] - again["token_level_rewards"]
    kl = (again["old_log_probs"] - again["ref_log_probs"]).square() / 2 * again["response_mask"]
    assert float((charged - made.algorithm.kl_ctrl.value * kl).abs().max()) < 1e-5 < float(charged.abs().max())


def test_the_critic_has_a_head_start(run_file: Path) -> None:
    with rig.opened(run_file, "algorithm.critic_warmup_steps=2") as made:
        actor = made.weights()
        for step in (1, 2, 3):
            critic = made.weights("critic")
            made.learn(made.collect())
            assert rig.distance(made.weights("critic"), critic) > 1e-4
            assert all(p.equal(actor[name]) for name, p in made.weights().items()) == (step <= 2)
            assert ("loss" in made.metrics) == (step > 2) and "critic_loss" in made.metrics
        assert made.session.progress.updates == 2


def test_the_critic_has_a_schedule_of_its_own(run_file: Path) -> None:
    with rig.opened(run_file) as made:
        made.session.progress.step = 2
        made.learn(made.collect())
    assert made.metrics["lr"] == 1e-2 and made.metrics["critic_lr"] == 0.5e-2  # linear, step 2 of 4


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_a_resumed_run_takes_the_steps_that_it_would_have_taken(run_file: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    options = [*rig.kl_options(run_file), *ADAPTIVE, "algorithm.critic_warmup_steps=1", "trainer.save_every=2"]
    assert run(["train", str(run_file), f"trainer.run_dir={run_dir}", *options]) == 0
    whole = metrics(run_dir)
    assert len({row["train/kl_coef"] for row in whole[1:]}) == 4
    first = checkpoints.folder_of(run_dir, 2)
    state = checkpoints.read_state(first)["algorithm"]
    assert state == {"kl_coef": pytest.approx(whole[3]["train/kl_coef"]), "steps": 2}
    assert (first / "critic").is_dir() and (first / "actor").is_dir()
    assert run(["train", str(run_dir / "config.yaml"), "--resume", str(first)]) == 0
    for again, before in zip(metrics(run_dir)[3:], whole[3:], strict=True):
        same = {name for name in before if name.startswith("train/")}
        assert {name: again[name] for name in same} == pytest.approx({name: before[name] for name in same}, rel=1e-6)
    # what is done with a finished run needs no critic
    assert run(["generate", str(run_dir), "--prompt", "12="]) == 0
