"""Tests of my-loss: it is its formula, and keeps what every loss has to."""

from __future__ import annotations

import math

import pytest
import torch

from drivetrain.numerics import Counts, LossInputs
from drivetrain.testing import LossConformance
from my_loss.loss import penalized


class TestLoss(LossConformance):
    """What every loss has to satisfy: masks, padding, micro-batches."""

    name = "my-loss"


def test_loss_is_the_formula() -> None:
    log_probs = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]], dtype=torch.float64)
    batch = {
        "advantages": torch.tensor([[0.5, 0.5], [-1.0, -1.0]], dtype=torch.float64),
        "old_log_probs": torch.tensor([[-1.0, -2.5], [-2.0, 0.0]], dtype=torch.float64),
        "response_mask": torch.tensor([[1, 1], [1, 0]]),
    }
    loss = penalized(LossInputs(log_probs=log_probs), batch, Counts.of(batch["response_mask"]), penalty=2.0).loss
    ratios = [0.5 * math.exp(0.0), 0.5 * math.exp(0.5), -1.0 * math.exp(-1.0)]
    assert loss.item() == pytest.approx((2.0 * (0.0 + 0.25 + 1.0) - sum(ratios)) / 3)
