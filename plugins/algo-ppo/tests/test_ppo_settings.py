"""Settings that contradict each other are refused; the roles follow from them."""

from __future__ import annotations

from pathlib import Path

import ppo_rig as rig
import pytest

from drivetrain import ConfigError, compute_advantage
from drivetrain_algo_ppo.plugin import drivetrain_algorithms


@pytest.mark.parametrize(
    "overrides, said",
    [
        (["algorithm.group_size=0"], "algorithm.group_size"),
        (["algorithm.lam=1.1"], "algorithm.lam"),
        (["algorithm.epochs=0"], "algorithm.epochs"),
        (["algorithm.clip_value=-1"], "algorithm.clip_value"),
        (["algorithm.normalize_by_std=true"], "unknown key 'normalize_by_std'"),
        (["algorithm.old_log_probs=rollout", "rollout.top_p=0.9"], "not the policy's"),
        (["rollout.temperature=0"], "tries nothing that could turn out better"),
        (["algorithm.aggregation=seq-mean-token-sum-norm"], "divides by a constant length"),
        (["algorithm.scale=6"], "does not divide by a constant length"),
        (["algorithm.kl_kind=k3"], "is not read while kl_coef is 0"),
        (["algorithm.kl_controller=adaptive"], "is not read while kl_coef is 0"),
        (["algorithm.kl_coef=0.1", "algorithm.target_kl=1"], "is not read while kl_controller is fixed"),
        (["algorithm.kl_coef=0.1", "algorithm.kl_horizon=9"], "is not read while kl_controller is fixed"),
        (["algorithm.critic_warmup_steps=4"], "the policy never learns: the run has 4 steps"),
        (["algorithm.policy_loss=kl"], "does not read 'clip_high'"),
        (["algorithm.advantage=gea"], "unknown advantage estimator 'gea'"),
        (["algorithm.advantage_args={gama: 1}"], "has no option 'gama'"),
        (["ref.backend.name=fsdp"], "has no role ref"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(run_file: Path, overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        rig.config(run_file, *overrides)
    assert said in str(raised.value)


def test_roles_follow_from_the_settings(run_file: Path) -> None:
    run = rig.config(run_file, "algorithm.kl_coef=0.1")
    assert run.ref is not None and run.critic is not None and run.critic.max_grad_norm == 0.3
    assert rig.config(run_file).ref is None and rig.config(run_file).algorithm.samples_per_prompt() == 2
    derived = rig.config(run_file, "critic=null")
    assert derived.critic is not None and derived.critic.optimizer == derived.actor.optimizer


def test_what_it_needs_is_said() -> None:
    [spec] = drivetrain_algorithms()
    assert spec.name == "ppo" and spec.requires == ("backend.train", "backend.values", "rollout.log_probs")


def test_another_estimator_can_be_selected(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from drivetrain.driver import policy_gradient

    asked = {}

    def recorded(batch, estimator, **options):
        asked[estimator] = options
        return compute_advantage(batch, "gae")

    monkeypatch.setattr(policy_gradient, "compute_advantage", recorded)
    with rig.opened(run_file, "algorithm.advantage_args={lam: 0.5}") as made:
        made.collect()
    assert asked == {"gae": {"gamma": 0.9, "lam": 0.5}}
