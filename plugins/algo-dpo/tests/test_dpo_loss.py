"""The loss ``dpo``: its formulas row by row, with gradients, and what it does with odd pairs."""

from __future__ import annotations

import dpo_rig as rig
import pytest
import torch
from torch import Tensor

from drivetrain.numerics import Counts, LossInputs
from drivetrain.testing import LossConformance
from drivetrain_algo_dpo.loss import dpo


class TestSigmoid(LossConformance):
    name = "dpo"
    options = {"beta": 0.3, "label_smoothing": 0.1}


class TestIPO(LossConformance):
    name = "dpo"
    options = {"beta": 0.3, "kind": "ipo"}


class TestHinge(LossConformance):
    name = "dpo"
    options = {"beta": 0.3, "kind": "hinge"}


PAIRS = [(0, 3), (4, 1), (2, 5)]  # rows of each pair, better and worse


def columns(seed: int = 0) -> dict[str, Tensor]:
    """Six rows, the two of a pair apart."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([4, 2, 3, 1, 4, 2])
    made: dict[str, Tensor] = {"response_mask": (torch.arange(4) < lengths[:, None]).long()}
    made["response_mask"][4, 1] = 0
    for name in ("log_probs", "ref_log_probs"):
        made[name] = -torch.rand(6, 4, generator=generator, dtype=torch.float64) * 3
    made["loss_group"], made["preference"] = torch.zeros(6).long(), torch.zeros(6)
    for number, (better, worse) in enumerate(PAIRS):
        made["loss_group"][[better, worse]] = 10 - number
        made["preference"][better], made["preference"][worse] = 1.0, -1.0
    return made


def evaluate(data: dict[str, Tensor], counts: Counts | None = None, **options: object):
    log_probs = data["log_probs"].clone().requires_grad_()
    counts = counts or Counts.of(data["response_mask"], data["loss_group"])
    result = dpo(LossInputs(log_probs=log_probs), data, counts, **options)
    (gradient,) = torch.autograd.grad(result.loss, log_probs)
    return result.loss.detach(), gradient, {name: metric.result() for name, metric in result.metrics.items()}


@pytest.mark.parametrize("options", [
    {"beta": 0.1}, {"beta": 2.0}, {"beta": 0.7, "label_smoothing": 0.2},
    {"beta": 0.1, "kind": "ipo"}, {"beta": 1.5, "kind": "ipo"}, {"beta": 0.1, "kind": "hinge"},
    {"beta": 0.9, "kind": "hinge"},
])  # fmt: skip
@pytest.mark.parametrize("seed", [0, 1])
def test_formula_and_gradient(options: dict[str, object], seed: int) -> None:
    data = columns(seed)
    loss, gradient, metrics = evaluate(data, **options)
    log_probs = data["log_probs"].clone().requires_grad_()
    ratios = []
    for row in range(6):
        tokens = [t for t in range(4) if data["response_mask"][row, t] == 1]
        ratios.append(torch.stack([log_probs[row, t] - data["ref_log_probs"][row, t] for t in tokens]))
    plain = {"kind": "sigmoid", **options}
    plain["smoothing"] = plain.pop("label_smoothing", 0.0)
    want = rig.mean_over_pairs(ratios, PAIRS, **plain)
    torch.testing.assert_close(loss, want.detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(gradient, torch.autograd.grad(want, log_probs)[0], rtol=0, atol=1e-12)
    ratios = [ratio.detach() for ratio in ratios]
    margins = [float(ratios[b].sum() - ratios[w].sum()) for b, w in PAIRS]
    assert metrics["margin"] == pytest.approx(sum(margins) / 3)
    assert metrics["preference_accuracy"] == pytest.approx(sum(m > 0 for m in margins) / 3)
    assert metrics["chosen_log_ratio"] == pytest.approx(sum(float(ratios[b].sum()) for b, _ in PAIRS) / 3)
    assert metrics["rejected_log_ratio"] == pytest.approx(sum(float(ratios[w].sum()) for _, w in PAIRS) / 3)


def test_the_gradient_of_the_paper() -> None:
    """Equation of section 4: beta sigma(-beta margin) (grad log pi(worse) - grad log pi(better)), mean over pairs."""
    data, beta = columns(), 0.6
    _, gradient, _ = evaluate(data, beta=beta)
    d = ((data["log_probs"] - data["ref_log_probs"]) * data["response_mask"]).sum(1)
    for better, worse in PAIRS:
        strength = beta / (1 + torch.exp(beta * (d[better] - d[worse]))) / 3
        torch.testing.assert_close(gradient[better], -strength * data["response_mask"][better])
        torch.testing.assert_close(gradient[worse], strength * data["response_mask"][worse])


def test_order_of_rows_does_not_matter() -> None:
    data, order = columns(), torch.tensor([5, 2, 0, 1, 4, 3])
    loss, gradient, metrics = evaluate(data)
    again, moved, same = evaluate({name: column[order] for name, column in data.items()})
    torch.testing.assert_close(again, loss, rtol=0, atol=1e-12)
    torch.testing.assert_close(moved, gradient[order], rtol=0, atol=1e-12)
    assert same == pytest.approx(metrics)


def test_rows_that_only_fill_a_batch_up_change_nothing() -> None:
    """Copies of rows with an empty mask, of pairs that are there."""
    data = columns()
    loss, gradient, metrics = evaluate(data)
    filled = {name: torch.cat([column, column[:2]]) for name, column in data.items()}
    filled["response_mask"][6:] = 0
    again, longer, same = evaluate(filled)
    torch.testing.assert_close(again, loss, rtol=0, atol=1e-12)
    torch.testing.assert_close(longer[:6], gradient, rtol=0, atol=1e-12)
    assert longer[6:].abs().sum() == 0 and same == pytest.approx(metrics)


def test_a_pair_without_tokens_counts_nowhere() -> None:
    data = columns()
    rest = [row for row in range(6) if row not in PAIRS[0]]
    want = evaluate({name: column[rest] for name, column in data.items()})
    data["response_mask"][list(PAIRS[0])] = 0
    loss, gradient, metrics = evaluate(data)
    torch.testing.assert_close(loss, want[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(gradient[rest], want[1], rtol=0, atol=1e-12)
    assert gradient[list(PAIRS[0])].abs().sum() == 0 and metrics == pytest.approx(want[2])


def test_a_response_without_tokens_has_the_log_ratio_zero() -> None:
    data = columns()
    data["response_mask"][3] = 0
    loss, _, metrics = evaluate(data, beta=0.5)
    d = ((data["log_probs"] - data["ref_log_probs"]) * data["response_mask"]).sum(1)
    margins = torch.stack([d[0], d[4] - d[1], d[2] - d[5]])
    torch.testing.assert_close(loss, torch.log(1 + torch.exp(-0.5 * margins)).mean(), rtol=0, atol=1e-12)
    assert metrics["margin"] == pytest.approx(float(margins.mean()))


def test_equal_log_ratios_give_log_two_and_no_preference() -> None:
    data = columns()
    data["ref_log_probs"] = data["log_probs"]
    loss, _, metrics = evaluate(data)
    assert float(loss) == pytest.approx(0.6931471805599453) and metrics["preference_accuracy"] == 0


def test_extreme_margins_stay_finite() -> None:
    data = columns()
    for sign in (1, -1):
        data["ref_log_probs"] = data["log_probs"] - sign * 1e4 * data["preference"][:, None]
        loss, gradient, _ = evaluate(data, beta=1.0)
        assert loss.isfinite() and gradient.isfinite().all()


@pytest.mark.parametrize("rows", [[0, 1, 4], [3, 1, 4]])
def test_a_separated_pair_is_noticed(rows: list[int]) -> None:
    with pytest.raises(ValueError, match="no better or no worse response"):
        evaluate({name: column[rows] for name, column in columns().items()})


@pytest.mark.parametrize("options", [{"kind": "kto"}, {"beta": 0.0}, {"kind": "ipo", "label_smoothing": 0.1}])
def test_a_bad_option_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="no loss of pairs"):
        evaluate(columns(), **options)
