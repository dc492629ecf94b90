"""The loss of my-algo."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from drivetrain.numerics import Counts, LossInputs, LossResult, aggregate, fill_masked

if TYPE_CHECKING:
    from torch import Tensor


def reinforce(outputs: LossInputs, batch: Mapping[str, Tensor], counts: Counts) -> LossResult:
    """``-A_t log p(y_t | x, y_<t)``, averaged over the tokens of the mini-batch.

    Args:
        outputs: ``log_probs`` (rows, response).
        batch: ``advantages`` and ``response_mask`` (rows, response).
        counts: of the whole mini-batch; ``aggregate`` divides by them.
    """
    mask = batch["response_mask"]
    losses = -fill_masked(batch["advantages"], mask) * fill_masked(outputs.require("log_probs"), mask)
    return LossResult(loss=aggregate(losses, mask, "token-mean", counts))
