"""The term ``nll``."""

from __future__ import annotations

import torch

from drivetrain.numerics import Counts, LossInputs
from drivetrain.testing import LossConformance
from drivetrain_algo_sft.loss import nll


class TestNLL(LossConformance):
    name = "nll"


def test_it_is_the_cross_entropy_of_the_response() -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 4, 11, dtype=torch.float64)
    targets = torch.randint(0, 11, (3, 4))
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]])
    log_probs = logits.log_softmax(-1).gather(2, targets[..., None])[..., 0]
    expected = torch.nn.functional.cross_entropy(logits[mask.bool()], targets[mask.bool()])
    loss = nll(LossInputs(log_probs=log_probs), {"response_mask": mask}, Counts.of(mask)).loss
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)
