"""What GRPO takes from the base of policy-gradient algorithms beyond its own paper."""

from __future__ import annotations

from pathlib import Path

import grpo_rig as rig
import pytest
import torch

from drivetrain.testing import tiny


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_loss_is_weighed_by_truncated_ratios(run_file: Path, level: str) -> None:
    """The rollout draws at another precision than the trainer: here its log-probs are noisy."""
    options = [f"algorithm.rollout_is={level}", "algorithm.rollout_is_threshold=1.2", "actor.mini_batch_prompts=4"]
    with rig.opened(run_file, *options) as made:
        drawn = made.roles.rollout.generate

        def noisy(prompts, **options):
            batch = drawn(prompts, **options)
            noise = 0.3 * torch.randn(batch["rollout_log_probs"].shape, generator=torch.Generator().manual_seed(1))
            return batch.with_columns(rollout_log_probs=batch["rollout_log_probs"] + noise)

        made.roles.rollout.generate = noisy
        batch = made.collect()
        learned, updates = made.learn(batch), made.rows_of_updates(batch)
    mask = batch["response_mask"] == 1
    difference = torch.where(mask, batch["old_log_probs"] - batch["rollout_log_probs"], 0.0)
    if level == "sequence":
        difference = difference.sum(1, keepdim=True).expand(mask.shape)
    weights = difference.exp().clamp(max=1.2)
    assert 0.1 < float((weights[mask] == 1.2).float().mean()) < 0.9
    torch.testing.assert_close(batch["rollout_is_weights"][mask], weights[mask])
    assert made.metrics["rollout_is_weight"] == pytest.approx(float(weights[mask].mean()), rel=1e-5)

    def loss(log_probs, entropy, batch, c):
        ratio, advantage = (log_probs - batch["old_log_probs"]).exp(), batch["advantages"]
        gain = torch.minimum(ratio * advantage, ratio.clamp(1 - c.clip_low, 1 + c.clip_high) * advantage)
        return -(weights * gain)[mask].mean()

    rig.assert_same(learned, tiny.learn_plainly(made.run, batch, updates, loss))


NEEDY = {
    "plugin.py": """
from drivetrain import AdvantageEstimatorSpec, hookimpl

@hookimpl
def drivetrain_advantage_estimators():
    yield AdvantageEstimatorSpec(name="above_greedy", summary="", factory="acme_greedy.work:above", scope="sequence",
                                 needs=("reward_baselines",))
    yield AdvantageEstimatorSpec(name="telepathic", summary="", factory="acme_greedy.work:above", scope="sequence",
                                 needs=("thoughts", "values"))
""",
    "work.py": """
def above(batch, group):
    scores = (batch["token_level_rewards"] * batch["response_mask"]).sum(1)
    return (scores - batch["reward_baselines"])[:, None] * batch["response_mask"]
""",
}


def test_an_estimator_that_needs_them_gets_greedy_baselines(needy: Path) -> None:
    with rig.opened(needy, "algorithm.advantage=above_greedy", "algorithm.group_size=2") as made:
        prompts = made.session.train_prompts.next_batch(4)
        greedy = made.roles.rewards.score(made.roles.rollout.generate(prompts, temperature=0.0))
        baseline = dict(zip(greedy["uid"].tolist(), greedy["scores"].tolist()))
        batch = made.algorithm.collect(made.roles, prompts)
    wanted = torch.tensor([baseline[uid] for uid in batch["uid"].tolist()])
    assert len(set(wanted.tolist())) > 1
    torch.testing.assert_close(batch["reward_baselines"], wanted)
    torch.testing.assert_close(batch["advantages"], (batch["scores"] - wanted)[:, None] * batch["response_mask"])


def test_an_estimator_that_needs_what_is_not_there_is_refused(needy: Path) -> None:
    with pytest.raises(Exception, match="needs thoughts and values, which algorithm 'grpo' does not have"):
        rig.config(needy, "algorithm.advantage=telepathic")


@pytest.fixture
def needy(run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run's file, with the distribution above among what is installed."""
    yield from rig.with_distribution(run_file, tmp_path, monkeypatch, "acme-greedy", NEEDY)
