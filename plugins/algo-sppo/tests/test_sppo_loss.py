"""The loss ``sppo``, and the win probabilities that it fits."""

from __future__ import annotations

import pytest
import sppo_rig as rig
import torch

from drivetrain.numerics import Counts, LossInputs
from drivetrain.testing import LossConformance
from drivetrain_algo_sppo.loss import sppo
from drivetrain_algo_sppo.preference import best_and_worst, win_rates


class TestSPPOLoss(LossConformance):
    name = "sppo"


class TestLargerStep(LossConformance):
    name = "sppo"
    options = {"eta": 5.0}


@pytest.mark.parametrize("seed", range(5))
def test_loss_and_gradient_are_the_formula(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    new, old = (-torch.rand(5, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    rates = torch.rand(5, generator=generator, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 1], [0, 0, 0, 0], [1, 1, 0, 0]])
    new.requires_grad_()
    batch = {"old_log_probs": old, "win_rate": rates, "response_mask": mask}
    result = sppo(LossInputs(log_probs=new), batch, Counts.of(mask), eta=3.0)
    result.loss.backward()

    loss, gradient, won, lost = 0.0, torch.zeros(5, 4, dtype=torch.float64), [], []
    for i in (0, 1, 2, 4):  # the row without tokens is not counted
        log_ratio = sum(float(new.detach()[i, t] - old[i, t]) for t in range(4) if mask[i, t])
        error = log_ratio - 3.0 * (float(rates[i]) - 0.5)
        loss += error**2 / 4
        for t in range(4):
            gradient[i, t] = 2 * error / 4 if mask[i, t] else 0.0
        (won if rates[i] > 0.5 else lost).append(log_ratio)
    assert result.loss.item() == pytest.approx(loss, abs=1e-12)
    torch.testing.assert_close(new.grad, gradient, rtol=0, atol=1e-12)
    for name, values in (("log_ratio_win", won), ("log_ratio_loss", lost)):
        assert result.metrics[name].result() == pytest.approx(sum(values) / len(values) if values else 0.0)


GROUP = torch.tensor([0, 1, 0, 1, 0, 2, 1, 0])
COUNTED = torch.tensor([True, True, True, True, False, True, True, True])


@pytest.mark.parametrize("temperature", [1.0, 0.3])
@pytest.mark.parametrize("preference", ["bradley_terry", "order"])
def test_win_rates_are_means_over_the_samples_of_a_prompt(preference: str, temperature: float) -> None:
    for seed in range(5):
        scores = torch.randint(0, 3, (8,), generator=torch.Generator().manual_seed(seed)).double()
        got = win_rates(scores, GROUP, COUNTED, preference=preference, temperature=temperature)
        for row in range(8):
            others = [float(scores[k]) for k in range(8) if GROUP[k] == GROUP[row] and COUNTED[k]]
            want = rig.plain_win_rate(float(scores[row]), others, preference, temperature) if COUNTED[row] else 0.5
            assert float(got[row]) == pytest.approx(want, abs=1e-12)
        assert got[5] == 0.5  # a sample alone
        # every win is another's loss
        assert [float(got[(GROUP == g) & COUNTED].mean()) for g in range(3)] == pytest.approx([0.5] * 3)


def test_equal_samples_win_half_the_time_exactly() -> None:
    for preference in ("bradley_terry", "order"):
        got = win_rates(torch.full((8,), 0.1), GROUP, COUNTED, preference=preference, temperature=0.7)
        assert (got == 0.5).all()


def test_a_score_that_is_a_win_rate_is_taken_as_it_is() -> None:
    scores = torch.linspace(0, 1, 8)
    got = win_rates(scores, GROUP, COUNTED, preference="win_rate")
    assert got[COUNTED].equal(scores[COUNTED]) and got[~COUNTED].tolist() == [0.5]


def test_permuting_the_rows_permutes_the_win_rates() -> None:
    scores, order = torch.tensor([3.0, 1.0, 2.0, 1.0, 9.0, 0.0, 4.0, 3.0]), torch.tensor([7, 2, 5, 0, 1, 4, 6, 3])
    whole = win_rates(scores, GROUP, COUNTED)
    torch.testing.assert_close(win_rates(scores[order], GROUP[order], COUNTED[order]), whole[order], rtol=0, atol=1e-7)


def test_best_and_worst_are_of_the_counted_samples_the_first_and_the_last_of_equals() -> None:
    scores = torch.tensor([3.0, 1.0, 2.0, 1.0, 9.0, 0.0, 1.0, 3.0])
    best, worst = best_and_worst(scores, GROUP, COUNTED)
    assert best.tolist() == [0, 1, 5] and worst.tolist() == [2, 6, 5]
    best, worst = best_and_worst(scores, GROUP, torch.zeros(8, dtype=torch.bool))
    assert best.tolist() == [0, 1, 5] and worst.tolist() == [7, 6, 5]
