"""What is done about a rollout that draws by other probabilities than the trainer's, and what is told of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpo_rig as rig
import pytest
import torch

from drivetrain import DataProto
from drivetrain.testing import tiny

BAND, REJECT = (0.8, 1.3), (0.9, 1.1)
CASES = [
    {"rollout_is": "none", "rollout_band": BAND},
    {"rollout_is": "none", "rollout_reject": REJECT},
    {"rollout_is": "token", "rollout_band": BAND, "rollout_is_threshold": 1.1},
    {"rollout_is": "sequence", "rollout_reject": REJECT, "rollout_is_threshold": 1.2},
    {"rollout_is": "sequence", "rollout_is_threshold": 0.9},
    {"rollout_is": "auto", "rollout_band": BAND, "rollout_reject": REJECT, "rollout_is_threshold": 1.2},
]


def noisy(made: Any) -> None:
    """Have the rollout report other log-probs than the trainer's, by 0.3 nats or so."""
    drawn = made.roles.rollout.generate

    def generate(prompts: DataProto, **options: Any) -> DataProto:
        batch = drawn(prompts, **options)
        noise = 0.3 * torch.randn(batch["rollout_log_probs"].shape, generator=torch.Generator().manual_seed(1))
        return batch.with_columns(rollout_log_probs=batch["rollout_log_probs"] + noise)

    made.roles.rollout.generate = generate


def plain_rows(batch: DataProto) -> list[list[float]]:
    """Log-ratios, trainer over rollout, of the drawn tokens of each row."""
    difference = (batch["old_log_probs"].double() - batch["rollout_log_probs"].double()).tolist()
    mask = batch["response_mask"].tolist()
    return [[d for d, m in zip(*both) if m] for both in zip(difference, mask)]


def plain_weights(row: Sequence[float], c: Any) -> list[float]:
    """Of the tokens of one row."""
    level, mean = "token" if c.rollout_is == "auto" else c.rollout_is, math.exp(sum(row) / len(row))
    weights = []
    for d in row:
        weight = {"none": 1.0, "token": math.exp(d), "sequence": math.exp(sum(row))}[level]
        weight = weight if level == "none" else min(weight, c.rollout_is_threshold)
        banned = c.rollout_band and not c.rollout_band[0] <= math.exp(d) <= c.rollout_band[1]
        rejected = c.rollout_reject and not c.rollout_reject[0] <= mean <= c.rollout_reject[1]
        weights.append(0.0 if banned or rejected else weight)
    return weights


@pytest.mark.parametrize("settings", CASES)
def test_weights_loss_and_metrics_by_rows(run_file: Path, settings: dict[str, Any]) -> None:
    """The loss is divided by the counts of the mask, whatever gets weight 0."""
    options = [f"algorithm.{key}={list(v) if isinstance(v, tuple) else v}" for key, v in settings.items()]
    with rig.opened(run_file, *options, "actor.mini_batch_prompts=4") as made:
        noisy(made)
        batch = made.collect()
        learned, updates = made.learn(batch), made.rows_of_updates(batch)
    c, mask, rows = made.run.algorithm, batch["response_mask"] == 1, plain_rows(batch)
    weights = [plain_weights(row, c) for row in rows]
    flat, ratios = [w for row in weights for w in row], [math.exp(d) for row in rows for d in row]
    torch.testing.assert_close(batch["rollout_is_weights"][mask], torch.tensor(flat), rtol=1e-5, atol=1e-6)
    assert (batch["rollout_is_weights"][~mask] == 0).all()

    metrics = {name: value for name, value in made.metrics.items() if name.startswith("rollout_")}
    tokens, level = len(flat), "token" if c.rollout_is == "auto" else c.rollout_is
    differences = [d for row in rows for d in row]
    wanted = {
        "rollout_mismatch": sum(map(abs, differences)) / tokens,
        "rollout_mismatch_max": max(map(abs, differences)),
        "rollout_kl": sum(r - 1 - math.log(r) for r in ratios) / tokens,
        "rollout_ppl_ratio": math.exp(-sum(differences) / tokens),
        "rollout_ess": sum(ratios) ** 2 / (tokens * sum(r * r for r in ratios)),
        "rollout_is_weight": sum(flat) / tokens,
    }
    if level == "token":
        wanted["rollout_truncated"] = sum(r > c.rollout_is_threshold for r in ratios) / tokens
    if level == "sequence":
        wanted["rollout_truncated"] = sum(math.exp(sum(row)) > c.rollout_is_threshold for row in rows) / len(rows)
    if c.rollout_band:
        wanted["rollout_masked"] = sum(not BAND[0] <= r <= BAND[1] for r in ratios) / tokens
    if c.rollout_reject:
        means = [math.exp(sum(row) / len(row)) for row in rows]
        wanted["rollout_rejected"] = sum(not REJECT[0] <= mean <= REJECT[1] for mean in means) / len(rows)
    assert metrics == pytest.approx(wanted, rel=1e-4)
    shares = [name for name in ("rollout_truncated", "rollout_masked", "rollout_rejected") if name in wanted]
    assert shares and all(0 < wanted[name] < 1 for name in shares)
    assert 0 < wanted["rollout_ess"] < 1 and max(flat) > 0

    def loss(log_probs, entropy, batch, c):
        ratio, advantage = (log_probs - batch["old_log_probs"]).exp(), batch["advantages"]
        gain = torch.minimum(ratio * advantage, ratio.clamp(1 - c.clip_low, 1 + c.clip_high) * advantage)
        return -(batch["rollout_is_weights"] * gain)[batch["response_mask"] == 1].mean()

    rig.assert_same(learned, tiny.learn_plainly(made.run, batch, updates, loss))


def test_auto_weighs_nothing_where_one_module_generates_and_learns(run_file: Path) -> None:
    with rig.opened(run_file) as made:
        assert made.roles.rollout.shares_weights
        batch = made.collect()
        made.learn(batch)
    assert "rollout_is_weights" not in batch and "rollout_is_weight" not in made.metrics
    assert made.metrics["rollout_mismatch"] <= made.metrics["rollout_mismatch_max"] <= 1e-5
    assert made.metrics["rollout_kl"] <= 1e-8 and made.metrics["rollout_ess"] == pytest.approx(1.0)
    assert made.metrics["rollout_ppl_ratio"] == pytest.approx(1.0, abs=1e-5)


def test_auto_weighs_tokens_where_engines_differ(run_file: Path) -> None:
    with rig.opened(run_file) as made:
        made.roles.rollout.shares_weights = False
        noisy(made)
        batch = made.collect()
    assert batch["rollout_is_weights"][batch["response_mask"] == 1].tolist() == pytest.approx(
        [min(math.exp(d), 2.0) for row in plain_rows(batch) for d in row], rel=1e-5
    )


def test_of_a_distribution_that_is_cut_down_the_weight_is_what_was_kept(run_file: Path) -> None:
    """A rollout of the same weights: each ratio is the probability of the tokens that top_p left, so never above 1."""
    with rig.opened(run_file, "rollout.top_p=0.7") as made:
        untouched = made.collect()
        made.learn(untouched)
        made.roles.rollout.shares_weights = False
        batch = made.collect()
    weights = batch["rollout_is_weights"][batch["response_mask"] == 1]
    assert 0.7 - 1e-4 <= float(weights.min()) < 0.9 and float(weights.max()) <= 1 + 1e-4
    metrics = made.metrics
    assert "rollout_is_weights" not in untouched and metrics["rollout_mismatch"] > 0.02
    assert math.log(metrics["rollout_ppl_ratio"]) == pytest.approx(metrics["rollout_mismatch"], rel=1e-3)


def test_a_loss_that_reads_no_weights_is_said_where_engines_differ(run_file: Path) -> None:
    path = run_file.with_name("unweighted.yaml")
    path.write_text(run_file.read_text().replace("  clip_high: 0.3\n", ""))
    with rig.opened(path, "algorithm.policy_loss=kl") as made:
        assert list(made.algorithm.notes(made.roles)) == []
        made.roles.rollout.shares_weights = False
        [note] = made.algorithm.notes(made.roles)
        assert "rollout_is auto comes to none" in note and "'kl' reads no importance weights" in note
        assert "rollout_is_weights" not in made.collect()
    for settings in (["algorithm.policy_loss=kl", "algorithm.rollout_is=none"], []):
        with rig.opened(path, *settings) as made:
            made.roles.rollout.shares_weights = False
            assert list(made.algorithm.notes(made.roles)) == []
