"""Masked reductions, returns, advantages, KL estimates, importance weights."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numerics_cases import Case, cases
from torch import Tensor
from torch.nn.functional import pad

from drivetrain.numerics import (
    KL_KINDS,
    band_mask,
    discounted_returns,
    effective_sample_size,
    gae,
    group_advantage,
    group_index,
    group_mean_std,
    kl_penalty,
    masked_mean,
    masked_std,
    masked_sum,
    masked_var,
    masked_whiten,
    truncated_weights,
)

quick = settings(max_examples=60, deadline=None)


def estimates(case: Case) -> dict[str, Tensor]:
    """Everything of shape (batch, response), over two groups."""
    batch, mask = case.batch, case.mask
    rewards, values = batch["token_level_rewards"], batch["values"]
    advantages, returns = gae(rewards, values, mask, 0.97, 0.9)
    group = torch.arange(mask.shape[0]) % 2 if "group" not in batch else batch["group"]
    return {
        "gae": advantages,
        "gae_returns": returns,
        "gae_whitened": gae(rewards, values, mask, 1.0, 1.0, whiten=True)[0],
        "discounted": discounted_returns(rewards, mask, 0.9),
        "whitened": masked_whiten(values, mask),
        "scaled": masked_whiten(values, mask, shift_mean=False),
        "grpo": group_advantage(batch, group),
        "dr_grpo": group_advantage(batch, group, normalize_by_std=False),
        "tis_token": truncated_weights(values, mask, "token"),
        "tis_sequence": truncated_weights(values, mask, "sequence"),
        "band_token": band_mask(values, mask, "token", 0.5, 1.5).to(values),
        "band_sequence": band_mask(values, mask, "sequence", 0.5, 1.5).to(values),
        "ess": effective_sample_size(values, mask) * (mask != 0),
    }


@quick
@given(cases())
def test_masked_positions_change_nothing(case: Case) -> None:
    poisoned = estimates(case.poisoned())
    for name, clean in estimates(case).items():
        assert torch.isfinite(clean).all(), name
        assert torch.equal(clean, poisoned[name]), name
        assert (clean[case.mask == 0] == 0).all(), name


@quick
@given(cases(), st.integers(1, 5))
def test_padding_changes_nothing(case: Case, extra: int) -> None:
    wide = case.map(lambda x: pad(x, (0, extra), value=float("nan")))
    wide.batch["response_mask"] = pad(case.mask, (0, extra))
    padded = estimates(wide)
    for name, narrow in estimates(case).items():
        torch.testing.assert_close(padded[name], pad(narrow, (0, extra)), rtol=1e-9, atol=1e-9)


@quick
@given(cases(), st.randoms(use_true_random=False))
def test_order_of_rows_is_free(case: Case, random: Random) -> None:
    case.batch["group"] = torch.arange(case.mask.shape[0]) % 2
    order = list(range(case.mask.shape[0]))
    random.shuffle(order)
    moved = estimates(case.map(lambda x: x[order]))
    for name, still in estimates(case).items():
        torch.testing.assert_close(moved[name], still[order], rtol=1e-9, atol=1e-9)


REDUCTIONS: dict[str, Callable[..., Tensor]] = {
    "sum": masked_sum,
    "mean": masked_mean,
    "var": masked_var,
    "std": masked_std,
    "whiten": lambda values, mask, dim=None: masked_whiten(values, mask),
}


@pytest.mark.parametrize("dim", [None, -1, 0])
@pytest.mark.parametrize("name", REDUCTIONS)
@quick
@given(case=cases())
def test_reduction_is_blind_to_masked_positions(name: str, dim: int | None, case: Case) -> None:
    def value_and_grad(values: Tensor) -> tuple[Tensor, Tensor]:
        leaf = values.clone().requires_grad_()
        reduced = REDUCTIONS[name](leaf, case.mask, dim=dim)
        (reduced * torch.arange(1, reduced.numel() + 1).view(reduced.shape)).sum().backward()
        assert leaf.grad is not None
        return reduced.detach(), leaf.grad

    value, grad = value_and_grad(case.batch["values"])
    poisoned_value, poisoned_grad = value_and_grad(case.poisoned().batch["values"])
    assert torch.isfinite(value).all() and torch.isfinite(grad).all()
    assert torch.equal(value, poisoned_value) and torch.equal(grad, poisoned_grad)
    assert (grad[case.mask == 0] == 0).all()


@quick
@given(cases())
def test_reduction_is_its_formula(case: Case) -> None:
    values, mask = case.batch["values"], case.mask
    for row, of_row, var, std in zip(
        values, mask, masked_var(values, mask, -1), masked_std(values, mask, -1), strict=True
    ):
        kept = row[of_row != 0].tolist()
        assert var.item() == pytest.approx(statistics.variance(kept) if len(kept) > 1 else 0.0, abs=1e-12)
        assert std.item() == pytest.approx(statistics.stdev(kept) if len(kept) > 1 else 0.0, abs=1e-12)
    kept = values[mask != 0].tolist()
    assert masked_sum(values, mask).item() == pytest.approx(sum(kept), abs=1e-12)
    assert masked_mean(values, mask).item() == pytest.approx(statistics.mean(kept) if kept else 0.0, abs=1e-12)
    if len(kept) > 1:
        white = masked_whiten(values, mask)[mask != 0]
        assert white.mean().item() == pytest.approx(0, abs=1e-9)
        variance = statistics.variance(kept)
        assert white.var().item() == pytest.approx(variance / (variance + 1e-8), rel=1e-9)
        scaled = masked_whiten(values, mask, shift_mean=False)[mask != 0]
        torch.testing.assert_close(scaled, white + statistics.mean(kept))


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match=r"\(2, 3\).*\(3,\)"):
        masked_sum(torch.ones(2, 3), torch.ones(3))


def plain_gae(
    rewards: list[float], values: list[float], mask: list[float], gamma: float, lam: float
) -> tuple[list[float], list[float]]:
    """The backward recursion of one row; masked positions are stepped over."""
    advantages, returns = [0.0] * len(rewards), [0.0] * len(rewards)
    upcoming = carried = 0.0
    for t in reversed(range(len(rewards))):
        if mask[t]:
            carried = rewards[t] + gamma * upcoming - values[t] + gamma * lam * carried
            upcoming = values[t]
            advantages[t], returns[t] = carried, carried + values[t]
    return advantages, returns


rates = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0, 1))


@given(st.integers(0, 2**31), st.integers(1, 3), st.integers(1, 300), st.floats(0, 1), rates, rates)
@settings(max_examples=60, deadline=None)
def test_gae_is_the_plain_recursion(seed: int, rows: int, width: int, density: float, gamma: float, lam: float) -> None:
    source = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, rows, width, generator=source, dtype=torch.float64)
    mask = (torch.rand(rows, width, generator=source) < density).double()
    advantages, returns = gae(rewards, values, mask, gamma, lam)
    discounted = discounted_returns(rewards, mask, gamma)
    for i in range(rows):
        row = rewards[i].tolist(), values[i].tolist(), mask[i].tolist()
        expected, expected_returns = plain_gae(*row, gamma, lam)
        assert advantages[i].tolist() == pytest.approx(expected, rel=1e-10, abs=1e-10)
        assert returns[i].tolist() == pytest.approx(expected_returns, rel=1e-10, abs=1e-10)
        assert discounted[i].tolist() == pytest.approx(plain_gae(*row, gamma, 1.0)[1], rel=1e-10, abs=1e-10)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.999, 0.95), (1.0, 0.0)])
def test_gae_is_stable_over_8192_tokens(gamma: float, lam: float) -> None:
    source = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 1, 8192, generator=source)
    mask = (torch.rand(1, 8192, generator=source) < 0.8).float()
    advantages, _ = gae(rewards, values, mask, gamma, lam)  # float32
    expected, _ = plain_gae(rewards[0].tolist(), values[0].tolist(), mask[0].tolist(), gamma, lam)
    assert advantages[0].tolist() == pytest.approx(expected, rel=1e-4, abs=2e-4)


def test_gae_is_detached_and_bounded() -> None:
    x = torch.ones(1, 3, requires_grad=True)
    assert not any(y.requires_grad for y in gae(x, x, torch.ones(1, 3), 1.0, 1.0))
    for gamma, lam, name in [(1.1, 0.5, "gamma"), (0.5, -0.1, "lam")]:
        with pytest.raises(ValueError, match=name):
            gae(x, x, torch.ones(1, 3), gamma, lam)
    with pytest.raises(ValueError, match="gamma"):
        discounted_returns(x, torch.ones(1, 3), math.nan)


@pytest.mark.parametrize("kind", KL_KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_kl_is_finite_at_extremes(kind: str, dtype: torch.dtype) -> None:
    log_probs = torch.tensor([-1000.0, 0.0, -90.0, 0.0], dtype=dtype, requires_grad=True)
    ref_log_probs = torch.tensor([0.0, -1000.0, 0.0, -90.0], dtype=dtype, requires_grad=True)
    kl = kl_penalty(log_probs, ref_log_probs, kind)
    kl.sum().backward()
    assert log_probs.grad is not None and ref_log_probs.grad is not None
    assert all(torch.isfinite(x).all() for x in (kl, log_probs.grad, ref_log_probs.grad))
    if kind in ("k2", "k3", "abs"):
        assert (kl > 80).all()


@given(st.floats(-15, 15))
@settings(max_examples=100, deadline=None)
def test_kl_is_its_formula(d: float) -> None:
    expected = {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - 1 - d, "abs": abs(d)}
    slopes = {"k1": 1.0, "k2": -d, "k3": 1 - math.exp(d), "abs": -math.copysign(1.0, d) if d else 0.0}
    for kind in KL_KINDS:
        log_prob = torch.zeros(1, dtype=torch.float64, requires_grad=True)
        kl = kl_penalty(log_prob, torch.tensor([d], dtype=torch.float64), kind)
        kl.backward()
        assert kl.item() == pytest.approx(expected[kind], rel=1e-9, abs=1e-9)
        assert log_prob.grad is not None
        assert log_prob.grad.item() == pytest.approx(slopes[kind], rel=1e-9, abs=1e-9)


def test_k3_keeps_small_differences_in_float32() -> None:
    d = torch.tensor([1e-4])
    assert kl_penalty(torch.zeros(1), d, "k3").item() == pytest.approx(0.5e-8, rel=0.01)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(-100, 100)), min_size=1, max_size=12))
@settings(max_examples=100, deadline=None)
def test_group_statistics(rows: list[tuple[str, float]]) -> None:
    uids, scores = [uid for uid, _ in rows], torch.tensor([score for _, score in rows], dtype=torch.float64)
    mean, std, size = group_mean_std(scores, np.array(uids, dtype=object))
    by_index = group_mean_std(scores, group_index(uids) * 10 + 3)
    assert all(torch.equal(a, b) for a, b in zip(by_index, (mean, std, size), strict=True))
    for i, uid in enumerate(uids):
        members = [score for other, score in rows if other == uid]
        assert size[i].item() == len(members)
        assert mean[i].item() == pytest.approx(statistics.mean(members), abs=1e-9)
        assert std[i].item() == pytest.approx(statistics.stdev(members) if len(members) > 1 else 0.0, abs=1e-9)


def test_group_index() -> None:
    assert group_index(["b", "a", "b", ("c", 1), "a"]).tolist() == [0, 1, 0, 2, 1]
    assert group_index(torch.tensor([5, 3, 5])).tolist() == [0, 1, 0]
    assert group_index([]).dtype == torch.int64
    with pytest.raises(ValueError, match="differ in shape"):
        group_mean_std(torch.ones(3), torch.zeros(2))


def test_groups_that_say_nothing_get_no_advantage() -> None:
    rewards = torch.zeros(10, 2)
    rewards[:8, 1] = 0.1  # eight equal scores that float32 does not add up exactly
    rewards[8, 0] = 3.0  # alone in its group
    mask = torch.ones(10, 2)
    mask[9] = 0  # a row without a token is no member of group 0
    group = torch.tensor([0] * 8 + [1, 0])
    batch = {"token_level_rewards": rewards, "response_mask": mask}
    assert torch.equal(group_advantage(batch, group), torch.zeros(10, 2))


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_truncated_weights_at_extremes(level: str) -> None:
    log_ratio = torch.tensor([[1000.0, 1000.0], [-1000.0, -1000.0], [0.0, 0.0]], requires_grad=True)
    weights = truncated_weights(log_ratio, torch.ones(3, 2), level, threshold=3.0)
    assert weights.tolist() == [[3.0, 3.0], [0.0, 0.0], [1.0, 1.0]]
    assert not weights.requires_grad


def test_truncated_weights_refusals() -> None:
    x = torch.ones(1, 2)
    with pytest.raises(ValueError, match="choose from token, sequence"):
        truncated_weights(x, x, "row")
    with pytest.raises(ValueError, match="threshold"):
        truncated_weights(x, x, threshold=0.0)


@quick
@given(cases(), st.floats(0.2, 1.0), st.floats(1.0, 4.0))
def test_bands_and_the_sample_size_by_rows(case: Case, low: float, high: float) -> None:
    log_ratio, mask = case.batch["values"], case.mask
    tokens = band_mask(log_ratio, mask, "token", low, high)
    sequences = band_mask(log_ratio, mask, "sequence", low, high)
    ratios = []
    for i, row in enumerate(log_ratio.tolist()):
        drawn = [t for t in range(len(row)) if mask[i, t] != 0]
        ratios += [math.exp(row[t]) for t in drawn]
        mean = math.prod(math.exp(row[t]) for t in drawn) ** (1 / len(drawn)) if drawn else math.nan
        for t in range(len(row)):
            assert tokens[i, t].item() == (t in drawn and low <= math.exp(row[t]) <= high)
            assert sequences[i, t].item() == (t in drawn and low <= mean <= high)
    squares = len(ratios) * sum(ratio**2 for ratio in ratios)
    expected = sum(ratios) ** 2 / squares if ratios else 0.0
    assert effective_sample_size(log_ratio, mask).item() == pytest.approx(expected, rel=1e-9)


def test_the_sample_size_at_extremes() -> None:
    ones = torch.ones(2, 4)
    assert effective_sample_size(torch.full((2, 4), 900.0), ones).item() == 1.0  # whose weights would overflow
    lone = torch.tensor([[0.0, -900.0, -900.0, -900.0]])
    assert effective_sample_size(lone, torch.ones(1, 4)).item() == 0.25
    assert effective_sample_size(ones, torch.zeros(2, 4)).item() == 0.0


def test_a_band_of_what_does_not_exist() -> None:
    with pytest.raises(ValueError, match="choose from token, sequence"):
        band_mask(torch.ones(1, 2), torch.ones(1, 2), "row", 0.5, 2.0)
