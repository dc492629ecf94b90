"""GRPO equals its formula, written out in plain PyTorch over padded rows."""

from __future__ import annotations

from pathlib import Path

import grpo_rig as rig
import pytest
import torch

from drivetrain import DataProto

REF = ["algorithm.kl_coef=0.1", "ref.backend.name=fsdp"]


def other(path: Path) -> str:
    return f"ref.model.path={path.parent / 'other'}"


def log_probs(path: Path, name: str, batch: DataProto, temperature: float = 1.0) -> torch.Tensor:
    with torch.no_grad():
        found = rig.plain_outputs(rig.plain_model(path.parent / name), batch, temperature)[0]
    return found * batch["response_mask"]


def variety(batch: DataProto) -> torch.Tensor:
    """The reward, from tokens: token n stands for the n-th character after two special ones."""
    texts = [
        [t for t in row[mask == 1].tolist() if t > 1] for row, mask in zip(batch["responses"], batch["response_mask"])
    ]
    return torch.tensor([len(set(text)) + 0.1 * len(text) for text in texts])


@pytest.fixture(scope="module")
def collected(run_file: Path) -> DataProto:
    """A batch of real completions whose ratios are far from 1, so that clipping matters."""
    with rig.opened(run_file, *REF, other(run_file)) as made:
        batch = made.collect()
    noise = 0.4 * torch.randn(batch["old_log_probs"].shape, generator=torch.Generator().manual_seed(0))
    return batch.with_columns(old_log_probs=batch["old_log_probs"] + noise * batch["response_mask"])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_what_is_collected(run_file: Path, temperature: float) -> None:
    with rig.opened(run_file, *REF, other(run_file), f"rollout.temperature={temperature}") as made:
        batch = made.collect()
    mask = batch["response_mask"]
    assert len(batch) == 12 and 12 < int(mask.sum()) < 72  # some responses end early
    policy = log_probs(run_file, "policy", batch, temperature)
    for name, want in [("old_log_probs", policy), ("rollout_log_probs", policy),
                       ("ref_log_probs", log_probs(run_file, "other", batch, temperature))]:  # fmt: skip
        torch.testing.assert_close(batch[name] * mask, want, rtol=0, atol=2e-5)
    advantages = rig.plain_advantages(variety(batch), batch["uid"].tolist())
    assert advantages.abs().max() > 0.5
    torch.testing.assert_close(batch["advantages"], advantages[:, None] * mask, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        ["algorithm.kl_coef=0.1", "algorithm.entropy_coef=0.05"],
        ["algorithm.aggregation=seq-mean-token-mean", "algorithm.kl_coef=0.1", "algorithm.kl_kind=k1"],
        ["algorithm.aggregation=seq-mean-token-sum", "algorithm.kl_coef=0.02", "algorithm.kl_kind=k2",
         "algorithm.clip_low=0.05", "rollout.temperature=0.7"],
        ["algorithm.aggregation=token-sum", "algorithm.kl_coef=0.1", "algorithm.kl_kind=abs",
         "actor.max_grad_norm=1e3"],
        ["algorithm.aggregation=seq-mean-token-sum-norm", "algorithm.scale=9", "algorithm.clip_dual=1.1",
         "algorithm.entropy_coef=0.01"],
    ],
)  # fmt: skip
def test_two_epochs_of_two_mini_batches(run_file: Path, collected: DataProto, options: list[str]) -> None:
    with rig.opened(run_file, *options, "algorithm.epochs=2") as made:
        updates = made.rows_of_updates(collected)
        assert len(updates) == 4 and sorted(updates[0] + updates[1]) == list(range(12))
        start, learned = made.weights(), made.learn(collected)
    assert rig.distance(learned, start) > 1e-2
    rig.assert_same(learned, rig.learn_plainly(made.run, collected, updates))
    assert made.session.progress.updates == 4


def test_nothing_changes_with_the_size_of_micro_batches(run_file: Path, collected: DataProto) -> None:
    options = ["algorithm.kl_coef=0.1", "algorithm.entropy_coef=0.05", "algorithm.aggregation=seq-mean-token-mean"]
    learned = []
    for tokens in (1, 30, 1000):
        with rig.opened(run_file, *options, f"actor.backend.micro_batch_tokens={tokens}") as made:
            learned.append(made.learn(collected))
    rig.assert_same(learned[0], learned[2], 5e-6)
    rig.assert_same(learned[1], learned[2], 5e-6)


def test_nothing_changes_with_what_stands_beyond_the_mask(run_file: Path, collected: DataProto) -> None:
    beyond = collected["response_mask"] == 0
    names = ("advantages", "old_log_probs", "ref_log_probs")
    spoiled = collected.with_columns(**{name: collected[name].masked_fill(beyond, torch.nan) for name in names})
    learned = []
    for batch in (collected, spoiled):
        with rig.opened(run_file, "algorithm.kl_coef=0.1", "algorithm.entropy_coef=0.05") as made:
            learned.append(made.learn(batch))
            assert all(torch.tensor(value).isfinite() for value in made.metrics.values())
    rig.assert_same(learned[1], learned[0], 0)


def test_the_kl_divergence_can_be_charged_to_the_reward(run_file: Path, collected: DataProto) -> None:
    options = ["algorithm.kl_coef=0.5", "algorithm.kl_in=reward", "algorithm.kl_kind=k2", "ref.backend.name=fsdp"]
    with rig.opened(run_file, *options, other(run_file), "algorithm.normalize_by_std=false") as made:
        batch = made.collect()
        learned, updates = made.learn(batch), made.rows_of_updates(batch)
    log_ratio = log_probs(run_file, "other", batch) - log_probs(run_file, "policy", batch)
    kl = log_ratio**2 / 2
    rewards = variety(batch) - 0.5 * kl.sum(1)
    advantages = rig.plain_advantages(rewards, batch["uid"].tolist(), by_std=False)[:, None] * batch["response_mask"]
    torch.testing.assert_close(batch["advantages"], advantages, rtol=1e-4, atol=1e-4)
    assert made.metrics["kl"] == pytest.approx(float(kl.sum() / batch["response_mask"].sum()), rel=1e-3)
    rig.assert_same(learned, rig.learn_plainly(made.run, batch, updates))  # whose loss has no KL


def test_ratios_can_start_from_the_log_probs_of_the_rollout(run_file: Path) -> None:
    with rig.opened(run_file, "algorithm.old_log_probs=rollout") as made:
        batch = made.collect()
    assert batch["old_log_probs"].equal(batch["rollout_log_probs"])
    torch.testing.assert_close(batch["old_log_probs"], log_probs(run_file, "policy", batch), rtol=0, atol=2e-5)
