"""Tests of my-algo: the loss is its formula, and the plugin offers what its name says."""

from __future__ import annotations

import torch

from drivetrain import resolve
from drivetrain.numerics import Counts, LossInputs
from drivetrain.testing import LossConformance
from my_algo.losses import reinforce


class TestLoss(LossConformance):
    """What every loss has to satisfy: masks, padding, micro-batches."""

    name = "my-algo"


def test_loss_is_the_formula() -> None:
    log_probs = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]], dtype=torch.float64)
    batch = {
        "advantages": torch.tensor([[0.5, 0.5], [-1.0, -1.0]], dtype=torch.float64),
        "response_mask": torch.tensor([[1, 1], [1, 0]]),
    }
    counts = Counts.of(batch["response_mask"])
    loss = reinforce(LossInputs(log_probs=log_probs), batch, counts).loss
    assert loss.item() == ((0.5 * 1 + 0.5 * 2) - 1.0 * 3) / 3


def test_it_can_be_selected() -> None:
    assert resolve("algorithms", "my-algo").__name__ == "MyAlgo"
