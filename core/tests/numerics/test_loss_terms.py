"""Loss terms: what must not matter does not, and the parts add up."""

from __future__ import annotations

import math
from dataclasses import replace
from operator import itemgetter
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numerics_cases import SCALES, TERMS, Case, cases, evaluate
from torch import Tensor
from torch.nn.functional import pad

from drivetrain.metrics import merge_metrics, to_floats
from drivetrain.numerics import AGGREGATIONS, Counts, LossInputs, aggregate, clip, entropy_bonus, kl_to_ref, value_clip

every_term = pytest.mark.parametrize("term", TERMS)
quick = settings(max_examples=40, deadline=None)


def same(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@every_term
@quick
@given(cases(), st.sampled_from(AGGREGATIONS))
def test_masked_positions_change_nothing(term: str, case: Case, mode: str) -> None:
    loss, grads, metrics = evaluate(term, case, mode)
    poisoned_loss, poisoned_grads, poisoned_metrics = evaluate(term, case.poisoned(), mode)
    assert torch.isfinite(loss)
    assert torch.equal(loss, poisoned_loss)
    for name in grads:
        assert torch.equal(grads[name], poisoned_grads[name])
        assert (poisoned_grads[name][case.mask == 0] == 0).all()
    assert to_floats(metrics) == to_floats(poisoned_metrics)


@every_term
@quick
@given(cases(), st.sampled_from(AGGREGATIONS), st.data())
def test_shares_sum_to_the_whole(term: str, case: Case, mode: str, data: st.DataObject) -> None:
    rows = case.mask.shape[0]
    owner = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=rows, max_size=rows)))
    counts = Counts.of(case.mask)
    loss, grads, metrics = evaluate(term, case, mode)
    total, parts = torch.zeros_like(loss), []
    for share in range(3):  # a share may be empty
        mine = owner == share
        part_loss, part_grads, part_metrics = evaluate(term, case.map(itemgetter(mine)), mode, counts)
        total += part_loss
        parts.append(part_metrics)
        for name in grads:
            same(part_grads[name], grads[name][mine])
    same(total, loss)
    merged = to_floats(merge_metrics(parts))
    assert merged == pytest.approx(to_floats(metrics), rel=1e-12, abs=1e-12)


@every_term
@quick
@given(cases(), st.sampled_from(AGGREGATIONS), st.integers(1, 4))
def test_padding_changes_nothing(term: str, case: Case, mode: str, extra: int) -> None:
    wide = case.map(lambda x: pad(x, (0, extra), value=float("nan")))
    wide.batch["response_mask"] = pad(case.mask, (0, extra))
    loss, grads, _ = evaluate(term, case, mode)
    wide_loss, wide_grads, _ = evaluate(term, wide, mode)
    same(wide_loss, loss)
    for name in grads:
        same(wide_grads[name], pad(grads[name], (0, extra)))


@every_term
@quick
@given(cases(), st.sampled_from(AGGREGATIONS), st.randoms(use_true_random=False))
def test_order_of_rows_is_free(term: str, case: Case, mode: str, random: Random) -> None:
    order = list(range(case.mask.shape[0]))
    random.shuffle(order)
    loss, grads, _ = evaluate(term, case, mode)
    moved_loss, moved_grads, _ = evaluate(term, case.map(lambda x: x[order]), mode)
    same(moved_loss, loss)
    for name in grads:
        same(moved_grads[name], grads[name][order])


@every_term
@quick
@given(cases(), st.sampled_from(AGGREGATIONS))
def test_rows_without_a_token_change_nothing(term: str, case: Case, mode: str) -> None:
    longer = case.map(lambda x: torch.cat([x, torch.zeros_like(x[:1])]))
    assert Counts.of(longer.mask) == Counts.of(case.mask)
    same(evaluate(term, longer, mode)[0], evaluate(term, case, mode)[0])


@pytest.mark.parametrize("mode", AGGREGATIONS)
@quick
@given(case=cases())
def test_aggregate_is_its_formula(mode: str, case: Case) -> None:
    rows = [
        [x for x, m in zip(row, mask, strict=True) if m]
        for row, mask in zip(case.batch["returns"].tolist(), case.mask.tolist(), strict=True)
    ]
    rows = [row for row in rows if row]
    tokens, sequences, total = max(sum(map(len, rows)), 1), max(len(rows), 1), sum(map(sum, rows))
    expected = {
        "token-mean": total / tokens,
        "token-sum": total,
        "seq-mean-token-sum": total / sequences,
        "seq-mean-token-mean": sum(sum(row) / len(row) for row in rows) / sequences,
        "seq-mean-token-sum-norm": total / sequences / 5.0,
    }[mode]
    loss = aggregate(case.batch["returns"], case.mask, mode, scale=SCALES[mode])
    assert loss.item() == pytest.approx(expected, abs=1e-12)


def clip_of_one_token(log_ratio: float, advantage: float, low: float, high: float, dual: float) -> tuple[float, float]:
    """Loss and its derivative by the log-prob, case by case."""
    ratio = math.exp(log_ratio)
    if advantage >= 0:
        return (-advantage * (1 + high), 0.0) if ratio > 1 + high else (-advantage * ratio, -advantage * ratio)
    if ratio < 1 - low:
        return -advantage * (1 - low), 0.0
    if ratio > dual:
        return -advantage * dual, 0.0
    return -advantage * ratio, -advantage * ratio


@given(
    st.floats(-3, 3),
    st.floats(-2, 2),
    st.floats(0.05, 0.5),
    st.floats(0.05, 0.5),
    st.floats(1.1, 4.0),
    st.floats(0.1, 2),
)
@settings(max_examples=200, deadline=None)
def test_clip_of_one_token(
    log_ratio: float, advantage: float, low: float, high: float, dual: float, weight: float
) -> None:
    expected, slope = clip_of_one_token(log_ratio, advantage, low, high, dual)
    log_prob = torch.tensor([[log_ratio]], dtype=torch.float64, requires_grad=True)
    one = torch.ones(1, 1, dtype=torch.float64)
    batch = {
        "response_mask": one,
        "old_log_probs": 0 * one,
        "advantages": advantage * one,
        "rollout_is_weights": weight * one,
    }
    result = clip(LossInputs(log_probs=log_prob), batch, Counts.of(one), clip_low=low, clip_high=high, clip_dual=dual)
    result.loss.backward()
    assert log_prob.grad is not None
    assert result.loss.item() == pytest.approx(weight * expected, abs=1e-12)
    assert log_prob.grad.item() == pytest.approx(weight * slope, abs=1e-12)
    metrics = to_floats(result.metrics)
    ratio = math.exp(log_ratio)
    assert metrics["ratio_max"] == pytest.approx(ratio)
    if abs(advantage) > 1e-3:
        assert metrics["clip_fraction_dual"] == float(advantage < 0 and ratio > dual)
        assert metrics["clip_fraction"] == float(ratio > 1 + high if advantage > 0 else ratio < 1 - low)


@pytest.mark.parametrize("log_ratio", [-1000.0, 1000.0])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_clip_is_finite_at_extremes(log_ratio: float, advantage: float) -> None:
    log_probs = torch.full((1, 2), log_ratio, requires_grad=True)  # float32
    batch = {
        "response_mask": torch.ones(1, 2),
        "old_log_probs": torch.zeros(1, 2),
        "advantages": torch.full((1, 2), advantage),
    }
    result = clip(LossInputs(log_probs=log_probs), batch, Counts.of(batch["response_mask"]))
    result.loss.backward()
    assert log_probs.grad is not None
    assert torch.isfinite(result.loss) and torch.isfinite(log_probs.grad).all()
    assert all(math.isfinite(value) for value in to_floats(result.metrics).values())
    assert "clip_fraction_dual" not in result.metrics


def test_entropy_bonus_rewards_entropy() -> None:
    entropy = torch.tensor([[1.0, 3.0]], requires_grad=True)
    batch = {"response_mask": torch.ones(1, 2)}
    result = entropy_bonus(LossInputs(entropy=entropy), batch, Counts.of(batch["response_mask"]))
    result.loss.backward()
    assert result.loss.item() == -2.0
    assert entropy.grad is not None and entropy.grad.tolist() == [[-0.5, -0.5]]
    assert to_floats(result.metrics) == {"entropy": 2.0}


def test_metrics_keep_no_graph() -> None:
    log_probs = torch.zeros(1, 2, requires_grad=True)
    batch = {name: torch.ones(1, 2) for name in ("response_mask", "old_log_probs", "advantages")}
    result = clip(LossInputs(log_probs=log_probs), batch, Counts.of(batch["response_mask"]))
    held = [value for metric in result.metrics.values() for value in vars(metric).values()]
    assert held and not any(value.requires_grad for value in held)


def test_counts() -> None:
    mask = torch.tensor([[1, 0, 1], [0, 0, 0], [0, 1, 0], [1, 1, 1]])
    group = torch.tensor([7, 8, 7, 9])
    assert Counts.of(mask, group) == Counts(tokens=6, sequences=3, groups=2)
    assert Counts.of(mask) == Counts(tokens=6, sequences=3, groups=3)
    assert Counts.of(mask.bool(), group) == Counts.of(mask.double(), group)


def test_refusals() -> None:
    x, none = torch.ones(1, 2), Counts(tokens=2, sequences=1, groups=1)
    batch = {"response_mask": x, "old_log_probs": x, "advantages": x, "values": x, "returns": x, "ref_log_probs": x}
    full = LossInputs(log_probs=x, values=x)
    with pytest.raises(ValueError, match=r"'token_mean'; choose from token-mean, token-sum"):
        aggregate(x, x, "token_mean")
    with pytest.raises(ValueError, match="positive scale"):
        aggregate(x, x, "seq-mean-token-sum-norm")
    with pytest.raises(ValueError, match="takes no scale"):
        aggregate(x, x, "token-mean", scale=3.0)
    with pytest.raises(ValueError, match="differ in shape"):
        aggregate(x, torch.ones(2), "token-mean")
    with pytest.raises(ValueError, match="needs entropy"):
        entropy_bonus(full, batch, none)
    with pytest.raises(ValueError, match="clip_dual"):
        clip(full, batch, none, clip_dual=1.0)
    with pytest.raises(ValueError, match="clip_range"):
        value_clip(full, batch, none, clip_range=-0.1)
    with pytest.raises(ValueError, match="choose from k1, k2, k3, abs"):
        kl_to_ref(full, batch, none, kind="k4")
    with pytest.raises(KeyError, match="ref_log_probs"):
        kl_to_ref(full, {"response_mask": x}, none)
    with pytest.raises(AttributeError):
        replace(none, tokens=1).tokens = 3  # type: ignore[misc]
