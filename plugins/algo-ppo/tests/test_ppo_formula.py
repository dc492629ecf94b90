"""PPO equals its formulas, written out in plain PyTorch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import ppo_rig as rig
import pytest
import torch

from drivetrain import DataProto, compute_advantage, resolve
from drivetrain.numerics import Counts, LossInputs

ROWS, TOKENS = 9, 7


@pytest.fixture(scope="module")
def numbers() -> DataProto:
    """Random columns; one row has no token, one a masked token in the middle."""
    random = torch.Generator().manual_seed(2)
    mask = (torch.arange(TOKENS) < torch.tensor([7, 3, 1, 0, 5, 2, 6, 4, 7])[:, None]).long()
    mask[0, 2] = 0
    names = ("token_level_rewards", "values", "returns", "advantages", "old_log_probs", "new_values", "new_log_probs")
    drawn = {name: torch.randn(ROWS, TOKENS, generator=random) for name in names}
    return DataProto.from_single_dict({**drawn, "response_mask": mask, "uid": list("aabbccdde")})


@pytest.mark.parametrize("gamma, lam", [(1.0, 0.95), (0.9, 0.7), (0.99, 0.0), (1.0, 1.0)])
def test_generalized_advantage_estimation(numbers: DataProto, gamma: float, lam: float) -> None:
    mask = numbers["response_mask"]
    got = compute_advantage(numbers, "gae", gamma=gamma, lam=lam)
    raw, returns = rig.plain_gae(numbers["token_level_rewards"], numbers["values"], mask, gamma, lam)
    torch.testing.assert_close(got["returns"], returns, rtol=0, atol=1e-5)
    torch.testing.assert_close(got["advantages"], rig.plain_whitened(raw, mask), rtol=0, atol=1e-5)
    chosen = got["advantages"][mask == 1]
    assert abs(float(chosen.mean())) < 1e-6 and float(chosen.std()) == pytest.approx(1, abs=1e-5)


def test_the_losses(numbers: DataProto) -> None:
    counts = Counts.of(numbers["response_mask"])
    c = SimpleNamespace(clip_low=0.1, clip_high=0.3, clip_dual=None, clip_value=0.4, entropy_coef=0.0)
    inputs = LossInputs(log_probs=numbers["new_log_probs"], values=numbers["new_values"])
    policy = resolve("policy_losses", "clip")(inputs, numbers.batch, counts, clip_low=0.1, clip_high=0.3).loss
    value = resolve("policy_losses", "value_clip")(inputs, numbers.batch, counts, clip_range=0.4).loss
    assert float(policy) == pytest.approx(float(rig.policy_loss(inputs.log_probs, torch.zeros(()), numbers, c)), 1e-5)
    assert float(value) == pytest.approx(float(rig.value_loss(inputs.values, numbers, c)), 1e-5)


def variety(batch: DataProto) -> torch.Tensor:
    """The reward, from tokens: token n stands for the n-th character after two special ones."""
    texts = [
        [t for t in row[mask == 1].tolist() if t > 1] for row, mask in zip(batch["responses"], batch["response_mask"])
    ]
    return torch.tensor([len(set(text)) + 0.1 * len(text) for text in texts])


@torch.no_grad()
def test_what_is_collected(run_file: Path) -> None:
    with rig.opened(run_file, *rig.kl_options(run_file)) as made:
        head = made.weights("critic")["score.weight"]
        batch = made.collect()
    mask = batch["response_mask"]
    assert len(batch) == 8 and 8 < int(mask.sum()) < 48  # some responses end early
    policy, other = (rig.plain_model(run_file.parent / name) for name in ("policy", "other"))
    log_probs, ref_log_probs = (rig.plain_log_probs(model, batch)[0] * mask for model in (policy, other))
    values = (rig.hidden_states(policy, batch) @ head[0]) * mask
    for name, want in [("old_log_probs", log_probs), ("ref_log_probs", ref_log_probs), ("values", values)]:
        torch.testing.assert_close(batch[name] * mask, want, rtol=0, atol=2e-5)
    rewards = -0.1 * (log_probs - ref_log_probs)
    last = mask.sum(1) - 1
    rewards[torch.arange(8), last] += variety(batch)
    torch.testing.assert_close(batch["token_level_rewards"], rewards, rtol=0, atol=2e-5)
    raw, returns = rig.plain_gae(rewards, values, mask, 0.9, 0.8)
    torch.testing.assert_close(batch["returns"], returns, rtol=0, atol=1e-4)
    torch.testing.assert_close(batch["advantages"], rig.plain_whitened(raw, mask), rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def collected(run_file: Path) -> DataProto:
    """A batch of real completions, with ratios and values that clipping changes."""
    with rig.opened(run_file) as made:
        batch = made.collect()
    random, mask = torch.Generator().manual_seed(0), batch["response_mask"]
    noise = 0.4 * torch.randn(2, *mask.shape, generator=random) * mask
    return batch.with_columns(old_log_probs=batch["old_log_probs"] + noise[0], values=batch["values"] + noise[1])


@pytest.mark.parametrize(
    "options", [[], ["algorithm.entropy_coef=0.05", "algorithm.clip_dual=1.2", "algorithm.clip_value=0.1"]]
)
def test_two_epochs_of_two_mini_batches(run_file: Path, collected: DataProto, options: list[str]) -> None:
    with rig.opened(run_file, "algorithm.epochs=2", *options) as made:
        updates = made.rows_of_updates(collected)
        assert len(updates) == 4 and sorted(updates[0] + updates[1]) == list(range(8))
        before = made.weights(), made.weights("critic")
        made.learn(collected)
        after = made.weights(), made.weights("critic")
    assert made.session.progress.updates == 4
    assert {"loss", "critic_loss", "grad_norm", "critic_grad_norm", "clip_fraction", "value_clip_fraction"} <= set(
        made.metrics
    )
    for ours, start, theirs in zip(
        after, before, rig.learn_plainly(made.run, collected, updates, before[1]["score.weight"])
    ):
        assert rig.distance(ours, start) > 1e-2
        rig.assert_same(ours, theirs)


def test_nothing_changes_with_the_size_of_micro_batches_or_what_stands_beyond_the_mask(
    run_file: Path, collected: DataProto
) -> None:
    beyond = collected["response_mask"] == 0
    names = ("advantages", "old_log_probs", "values", "returns")
    spoiled = collected.with_columns(**{name: collected[name].masked_fill(beyond, torch.nan) for name in names})
    learned = []
    for tokens, batch in ((1, collected), (1000, spoiled)):
        sizes = [f"{role}.backend.micro_batch_tokens={tokens}" for role in ("actor", "critic")]
        with rig.opened(run_file, *sizes) as made:
            made.learn(batch)
            learned.append((made.weights(), made.weights("critic")))
            assert all(torch.tensor(value).isfinite() for value in made.metrics.values())
    for one, other in zip(*learned):
        rig.assert_same(one, other, 5e-6)


def test_ratios_can_start_from_the_log_probs_of_the_rollout(run_file: Path) -> None:
    with rig.opened(run_file, "algorithm.old_log_probs=rollout") as made:
        batch = made.collect()
    assert batch["old_log_probs"].equal(batch["rollout_log_probs"])


def test_tokens_are_weighed_where_engines_differ(run_file: Path) -> None:
    """By default, as in every algorithm of the same base; here they are told to, and agree but for rounding."""
    with rig.opened(run_file, "algorithm.rollout_band=[0.5,5]") as made:
        made.roles.rollout.shares_weights = False
        batch = made.collect()
        made.learn(batch)
    torch.testing.assert_close(batch["rollout_is_weights"], batch["response_mask"].float(), rtol=0, atol=1e-4)
    assert made.metrics["rollout_masked"] == 0 and made.metrics["rollout_is_weight"] == pytest.approx(1, abs=1e-4)
