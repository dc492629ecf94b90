"""Settings that contradict each other are refused, and parts of other distributions can be selected."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpo_rig as rig
import pytest
import torch

from drivetrain import ConfigError
from drivetrain.driver import run_folder


@pytest.mark.parametrize(
    "overrides, said",
    [
        (["algorithm.group_size=1"], "algorithm.group_size"),
        (["algorithm.old_log_probs=rollout", "rollout.top_p=0.9"], "not the policy's"),
        (["algorithm.old_log_probs=rollout", "rollout.top_k=3"], "not the policy's"),
        (["algorithm.aggregation=seq-mean-token-sum-norm"], "a constant length that is not set"),
        (["algorithm.scale=6"], "token-mean does not divide by a constant length"),
        (["algorithm.kl_kind=k1"], "is not read while kl_coef is 0"),
        (["algorithm.clip_dual=1"], "algorithm.clip_dual"),
        (["algorithm.policy_loss=kl", "algorithm.clip_low=0.1"], "policy loss 'kl' does not read 'clip_low'"),
        (["algorithm.policy_loss=entropy"], "does not read 'clip_high'"),  # which the file sets
        (["algorithm.policy_loss_args={clip_middle: 1}"], "has no option 'clip_middle'"),
        (["algorithm.advantage=gae"], "needs values, which algorithm 'grpo' does not have"),
        (["algorithm.rollout_is=token", "algorithm.old_log_probs=rollout"], "takes the rollout's for both"),
        (["algorithm.rollout_is=none", "algorithm.rollout_is_threshold=3"], "is not read while rollout_is is"),
        (["algorithm.old_log_probs=rollout", "algorithm.rollout_is_threshold=3"], "is not read while rollout_is is"),
        (["algorithm.policy_loss=kl", "algorithm.rollout_is_threshold=3"], "is not read while rollout_is is"),
        (["algorithm.old_log_probs=rollout", "algorithm.rollout_band=[0.5,5]"], "or remove rollout_band"),
        (["algorithm.old_log_probs=rollout", "algorithm.rollout_reject=[0.9,1.1]"], "or remove rollout_reject"),
        (["algorithm.policy_loss=kl", "algorithm.rollout_band=[0.5,5]"], "or remove rollout_band"),
        (["algorithm.rollout_band=[0,5]"], "algorithm.rollout_band.0"),
        (["algorithm.rollout_band=[1.1,5]"], "algorithm.rollout_band.0"),
        (["algorithm.rollout_reject=[0.5,0.9]"], "algorithm.rollout_reject.1"),
        (["algorithm.rollout_reject=[0.5]"], "algorithm.rollout_reject.1"),
        (["algorithm.rollout_is=token", "algorithm.policy_loss=kl"], "does not read importance weights"),
        (["algorithm.advantage=gae", "algorithm.epsilon=0.1"], "advantage estimator 'gae' does not read 'epsilon'"),
        (["algorithm.advantage=gropo"], "unknown advantage estimator 'gropo'"),
        (["rollout.temperature=0"], "greedy sampling draws every sample alike"),
        (["ref.backend.name=fsdp"], "has no role ref"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(run_file: Path, overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        rig.config(run_file, *overrides)
    assert said in str(raised.value)


@pytest.mark.parametrize("overrides, apart, shared", [
    ([], "token", "none"),
    (["algorithm.rollout_is=none"], "none", "none"),
    (["algorithm.rollout_is=sequence"], "sequence", "sequence"),
    (["algorithm.rollout_band=[0.5,5]"], "token", "token"),
    (["algorithm.rollout_reject=[0.5,5]"], "token", "token"),
    (["algorithm.rollout_is=none", "algorithm.rollout_band=[0.5,5]"], "none", "none"),
    (["algorithm.old_log_probs=rollout"], "none", "none"),
    (["algorithm.policy_loss=kl", "algorithm.clip_high=0.2"], "none", "none"),
])  # fmt: skip
def test_what_auto_comes_to(run_file: Path, overrides: list[str], apart: str, shared: str) -> None:
    algorithm = rig.config(run_file, *overrides).algorithm
    assert (algorithm.correction(shared=False), algorithm.correction(shared=True)) == (apart, shared)


def test_the_reference_follows_from_the_kl_divergence(run_file: Path) -> None:
    assert rig.config(run_file).ref is None
    assert rig.config(run_file, "algorithm.kl_coef=0.1").ref.backend.name == "fsdp"


PLUGIN = """
from drivetrain import AdvantageEstimatorSpec, PolicyLossSpec, hookimpl

@hookimpl
def drivetrain_advantage_estimators():
    yield AdvantageEstimatorSpec(name="raw", summary="The score itself.", factory="acme_parts.work:raw",
                                 scope="sequence", options=("offset",))

@hookimpl
def drivetrain_policy_losses():
    yield PolicyLossSpec(name="plain", summary="REINFORCE.", factory="acme_parts.work:plain", scope="token",
                         options=("strength",))
"""
WORK = """
from drivetrain.numerics import LossResult, aggregate, fill_masked

def raw(batch, group, *, offset=0.0):
    mask = batch["response_mask"]
    return fill_masked((batch["token_level_rewards"].sum(1, keepdim=True) - offset).expand(mask.shape), mask)

def plain(outputs, batch, counts, *, strength=1.0):
    loss = -strength * batch["advantages"] * outputs.log_probs
    return LossResult(loss=aggregate(loss, batch["response_mask"], "seq-mean-token-sum", counts))
"""
CHOSEN = ["algorithm.advantage=raw", "algorithm.advantage_args={offset: 2}", "algorithm.policy_loss=plain",
          "algorithm.policy_loss_args={strength: 0.5}", "algorithm.kl_coef=0.1"]  # fmt: skip


@pytest.fixture
def with_parts(run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A config that leaves the options of ``clip`` alone, on a machine where ``acme-parts`` is installed."""
    yield from rig.with_distribution(run_file, tmp_path, monkeypatch, "acme-parts",
                                     {"plugin.py": PLUGIN, "work.py": WORK})  # fmt: skip


def plain_loss(log_probs: torch.Tensor, entropy: torch.Tensor, batch, c) -> torch.Tensor:
    gain = [0.5 * a[m == 1] * p[m == 1] for a, p, m in zip(batch["advantages"], log_probs, batch["response_mask"])]
    kl = (rig.KL["k3"](batch["ref_log_probs"] - log_probs))[batch["response_mask"] == 1].mean()
    return 0.1 * kl - torch.stack([row.sum() for row in gain]).mean()


def test_parts_of_another_distribution_are_selected_by_name(with_parts: Path) -> None:
    with rig.opened(with_parts, *CHOSEN) as made:
        batch = made.collect()
        learned, updates = made.learn(batch), made.rows_of_updates(batch)
    want = (batch["scores"][:, None] - 2) * batch["response_mask"]
    torch.testing.assert_close(batch["advantages"], want)
    rig.assert_same(learned, rig.learn_plainly(made.run, batch, updates, plain_loss))


def test_the_config_that_a_run_keeps_gives_such_parts_the_same_options(with_parts: Path, tmp_path: Path) -> None:
    run = rig.config(with_parts, *CHOSEN)
    run_folder.write_config(tmp_path, run)
    again = rig.config(tmp_path / run_folder.CONFIG_FILE).algorithm
    assert again.advantage_options() == run.algorithm.advantage_options() == {"offset": 2}
    assert again.policy_loss_options() == run.algorithm.policy_loss_options() == {"strength": 0.5}


@pytest.mark.parametrize(
    "overrides, said",
    [
        (["algorithm.policy_loss=plain", "algorithm.clip_low=0.1"], "'plain' does not read 'clip_low'"),
        (["algorithm.advantage=raw", "algorithm.normalize_by_std=false"], "'raw' does not read 'normalize_by_std'"),
        (["algorithm.advantage=raw", "algorithm.advantage_args={strength: 1}"], "its options: offset"),
    ],
)
def test_a_setting_that_such_a_part_would_ignore_is_refused(with_parts: Path, overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        rig.config(with_parts, *overrides)
    assert said in str(raised.value)
