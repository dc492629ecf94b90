"""Each loss is its formula, written out in plain_losses.py, on random numbers; value and gradient."""

from __future__ import annotations

import inspect
import math
from typing import Any

import plain_losses as plain
import pytest
import torch
from torch import Tensor

from drivetrain import resolve
from drivetrain.metrics import to_floats
from drivetrain.numerics import Counts, LossInputs, LossResult
from drivetrain.seam.registry import get_registry
from drivetrain.testing import LossConformance
from drivetrain.testing.batches import random_columns

OPTIONS: dict[str, dict[str, Any]] = {
    "gspo": {"clip_low": 0.05, "clip_high": 0.1},
    "gmpo": {"clip_low": 0.2, "clip_high": 0.3},
    "cispo": {"clip_low": 0.3, "clip_high": 0.2},
    "sapo": {"tau_pos": 1.0, "tau_neg": 1.4},
    "gpg": {},
    "clip_cov": {"clip_low": 0.2, "clip_high": 0.3, "cov_low": 0.05, "cov_high": 3.0, "cov_fraction": 0.1},
    "kl_cov": {"cov_fraction": 0.2, "cov_kl_coef": 0.7},
    "dro": {"beta": 0.3},
}
every_loss = pytest.mark.parametrize("name", OPTIONS)


def columns(seed: int, weights: bool = True, spread: float = 0.5) -> dict[str, Tensor]:
    """Random columns whose ratios are far from 1, with a row without a token."""
    made = random_columns(seed)
    generator = torch.Generator().manual_seed(seed)
    noise = spread * torch.randn(8, 6, generator=generator, dtype=torch.float64)
    made["old_log_probs"] = made["log_probs"] + noise
    if weights:
        made["rollout_is_weights"] = 2 * torch.rand(8, 6, generator=generator, dtype=torch.float64)
    made["response_mask"][6] = 0
    return made


def evaluate(name: str, batch: dict[str, Tensor], **options: Any) -> tuple[LossResult, Tensor]:
    log_probs = batch["log_probs"].clone().requires_grad_()
    counts = Counts.of(batch["response_mask"])
    result: LossResult = resolve("policy_losses", name)(LossInputs(log_probs=log_probs), batch, counts, **options)
    (gradient,) = torch.autograd.grad(result.loss, log_probs)
    return result, gradient


def same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gspo", {"clip_low": 3e-4, "clip_high": 4e-4}),
        ("gspo", OPTIONS["gspo"]),
        ("gmpo", OPTIONS["gmpo"]),
        ("cispo", OPTIONS["cispo"]),
        ("cispo", {"clip_low": 2.0, "clip_high": 0.2, "aggregation": "seq-mean-token-sum"}),
        ("sapo", OPTIONS["sapo"]),
        ("sapo", {"tau_pos": 0.5, "tau_neg": 2.0, "aggregation": "token-mean"}),
        ("gpg", {}),
        ("gpg", {"aggregation": "seq-mean-token-sum-norm", "scale": 9.0}),
        ("kl_cov", OPTIONS["kl_cov"]),
        ("dro", {"beta": 0.3, "level": "sequence", "aggregation": "seq-mean-token-sum"}),
        ("dro", {"beta": 0.3, "level": "sequence", "aggregation": "token-mean"}),
        ("dro", {"beta": 0.3, "level": "token", "aggregation": "seq-mean-token-mean"}),
    ],
)
def test_loss_is_its_formula(name: str, options: dict[str, Any], seed: int, weights: bool) -> None:
    batch = columns(seed, weights)
    result, gradient = evaluate(name, batch, **options)
    log_probs = batch["log_probs"].clone().requires_grad_()
    expected = plain.PLAIN[name](plain.rows_of(log_probs, batch), **options)
    (expected_gradient,) = torch.autograd.grad(expected, log_probs)
    assert expected_gradient.abs().max() > 1e-3
    same(result.loss, expected)
    same(gradient, expected_gradient)


@pytest.mark.parametrize("seed", range(1, 7))
def test_clip_cov_drops_tokens_of_high_covariance_and_clips_elsewhere(seed: int) -> None:
    batch, options = columns(seed), OPTIONS["clip_cov"]
    result, gradient = evaluate("clip_cov", batch, **options)
    log_probs = batch["log_probs"].clone().requires_grad_()
    rows = plain.rows_of(log_probs, batch)
    tokens, covs = [x for row in rows for x in row], [c for row in plain.covariances(rows) for c in row]
    losses = [plain.ppo(x, options["clip_low"], options["clip_high"]) for x in tokens]
    eligible = [options["cov_low"] < c < options["cov_high"] and not cut for c, (_, cut) in zip(covs, losses)]
    number = max(int(options["cov_fraction"] * len(covs)), 1)
    assert number < sum(eligible)
    # which of the eligible tokens were drawn is read off the gradient; everything else is the formula
    slopes = gradient[batch["response_mask"] != 0].tolist()
    drawn = [may and slope == 0 for may, slope in zip(eligible, slopes)]
    assert sum(drawn) == number
    kept = [x["weight"] * (0.0 if out else 1.0) * loss for x, (loss, _), out in zip(tokens, losses, drawn)]
    expected = torch.stack(kept).mean()
    (expected_gradient,) = torch.autograd.grad(expected, log_probs)
    same(result.loss, expected)
    same(gradient, expected_gradient)
    assert to_floats(result.metrics)["cov_fraction"] == pytest.approx(number / len(covs))


def test_clip_cov_draws_evenly() -> None:
    """Over 800 mini-batches each of 16 equally eligible tokens is drawn in about 50."""
    log_probs = torch.tensor([[-0.1] * 8 + [-2.1] * 8], dtype=torch.float64)
    advantages = torch.tensor([[1.0] * 8 + [-1.0] * 8], dtype=torch.float64)
    generator, drawn = torch.Generator().manual_seed(0), torch.zeros(16)
    for _ in range(800):
        noisy = log_probs + 1e-3 * torch.randn(1, 16, generator=generator, dtype=torch.float64)
        batch = {"log_probs": noisy, "old_log_probs": noisy, "advantages": advantages}
        _, gradient = evaluate("clip_cov", batch | {"response_mask": torch.ones(1, 16)}, cov_low=0.5)
        drawn += gradient[0] == 0
    assert drawn.sum() == 800 and drawn.min() > 25 and drawn.max() < 75


def test_without_an_eligible_token_clip_cov_is_clip() -> None:
    batch = columns(0)
    result, gradient = evaluate("clip_cov", batch, cov_low=100.0, cov_high=200.0)
    clip, clip_gradient = evaluate("clip", batch)
    same(result.loss, clip.loss)
    same(gradient, clip_gradient)
    assert to_floats(result.metrics)["cov_fraction"] == 0


@pytest.mark.parametrize(("name", "options"), [("clip_cov", {"cov_low": -1.0}), ("kl_cov", {})])
def test_tokens_that_tie_for_too_few_places_are_not_chosen(name: str, options: dict[str, float]) -> None:
    batch = columns(0)
    for constant in ("advantages", "log_probs", "old_log_probs"):
        batch[constant] = -torch.ones_like(batch[constant])
    result, gradient = evaluate(name, batch, cov_fraction=0.5, **options)
    assert to_floats(result.metrics)["cov_fraction"] == 0
    assert ((gradient != 0) == (batch["response_mask"] != 0)).all()
    result, _ = evaluate(name, batch, cov_fraction=1.0, **options)  # places for all of them
    assert to_floats(result.metrics)["cov_fraction"] == 1


@every_loss
def test_a_constant_importance_weight_scales_the_loss(name: str) -> None:
    batch = columns(1, weights=False)
    result, gradient = evaluate(name, batch, **OPTIONS[name])
    weights = torch.full_like(batch["advantages"], 1.5).masked_fill(batch["response_mask"] == 0, torch.nan)
    again, gradient_again = evaluate(name, batch | {"rollout_is_weights": weights}, **OPTIONS[name])
    same(again.loss, 1.5 * result.loss)
    same(gradient_again, 1.5 * gradient)


@every_loss
def test_where_policies_agree_the_gradient_is_that_of_reinforce(name: str) -> None:
    """At ratio 1, advantages equal along a sequence, each sequence counting once."""
    batch = columns(2, weights=False, spread=0.0)
    batch["advantages"] = batch["advantages"][:, :1].expand(8, 6)
    options: dict[str, Any] = {} if name in ("gspo", "gmpo") else {"aggregation": "seq-mean-token-mean"}
    if name == "clip_cov":
        options["cov_low"] = 0.05
    result, gradient = evaluate(name, batch, **options)
    _, expected = evaluate("policy_gradient", batch, aggregation="seq-mean-token-mean")
    if name == "clip_cov":  # but for the one token that it drops
        kept = gradient != 0
        assert kept.sum() == batch["response_mask"].sum() - 1
        gradient, expected = gradient[kept], expected[kept]
    same(gradient, expected)
    if name != "gpg":
        assert to_floats(result.metrics)["approx_kl"] == 0 and to_floats(result.metrics)["ratio_max"] == 1


@every_loss
def test_extreme_ratios_stay_finite(name: str) -> None:
    batch = {key: column.float() for key, column in columns(3).items()}
    batch["log_probs"][:, 0], batch["old_log_probs"][:, 0] = -1e3, 0.0
    batch["log_probs"][:, 1], batch["old_log_probs"][:, 1] = 0.0, -1e3
    batch["rollout_is_weights"][0, 1] = 0.0
    result, gradient = evaluate(name, batch, **OPTIONS[name])
    assert result.loss.isfinite() and gradient.isfinite().all() and result.loss.dtype == torch.float32
    assert all(math.isfinite(value) for value in to_floats(result.metrics).values())


@every_loss
def test_options_of_the_spec_are_those_of_the_function(name: str) -> None:
    parameters = inspect.signature(resolve("policy_losses", name)).parameters.values()
    keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    assert sorted(get_registry().find("policy_losses", name).spec.options) == sorted(keywords)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("sapo", {"tau_neg": 0.0}, "tau_neg must be positive"),
        ("dro", {"level": "group"}, "unknown level 'group'"),
        ("dro", {"beta": -1.0}, "beta must not be negative"),
        ("clip_cov", {"cov_fraction": 1.5}, "between 0 and 1"),
        ("kl_cov", {"cov_fraction": -0.1}, "between 0 and 1"),
    ],
)
def test_bad_options_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate(name, columns(0), **options)


class TestGSPO(LossConformance):
    name, options = "gspo", OPTIONS["gspo"]


class TestGMPO(LossConformance):
    name, options = "gmpo", OPTIONS["gmpo"]


class TestCISPO(LossConformance):
    name, options = "cispo", OPTIONS["cispo"]


class TestSAPO(LossConformance):
    name, options = "sapo", OPTIONS["sapo"]


class TestGPG(LossConformance):
    name, options = "gpg", OPTIONS["gpg"]


class TestClipCov(LossConformance):
    name, options = "clip_cov", OPTIONS["clip_cov"]


class TestKLCov(LossConformance):
    name, options = "kl_cov", OPTIONS["kl_cov"]


class TestDRO(LossConformance):
    name, options = "dro", OPTIONS["dro"]


class TestDROByToken(LossConformance):
    name, options = "dro", {"level": "token", "beta": 0.3}
