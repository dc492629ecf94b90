"""Tests of my-advantage: the estimator is its formula, and keeps what every estimator has to."""

from __future__ import annotations

import torch

from drivetrain.testing import AdvantageConformance
from my_advantage.advantage import bounded


class TestAdvantage(AdvantageConformance):
    """What every estimator has to satisfy: masks, padding, the order of rows, parts."""

    name = "my-advantage"


def test_advantages_are_the_formula() -> None:
    batch = {
        "token_level_rewards": torch.tensor([[0.0, 3.0], [1.0, 0.0], [0.5, 0.0]]),
        "response_mask": torch.tensor([[1, 1], [1, 0], [1, 0]]),
    }
    advantages = bounded(batch, torch.tensor([0, 0, 1]), bound=0.75)
    assert advantages.tolist() == [[0.75, 0.75], [-0.75, 0.0], [0.0, 0.0]]
    assert bounded(batch, torch.tensor([0, 0, 1]), bound=9.0).tolist() == [[1.0, 1.0], [-1.0, 0.0], [0.0, 0.0]]
