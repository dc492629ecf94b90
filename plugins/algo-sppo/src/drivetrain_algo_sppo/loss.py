"""The loss of SPPO."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from drivetrain.metrics import Mean
from drivetrain.numerics import Counts, LossInputs, LossResult, fill_masked, masked_sum

if TYPE_CHECKING:
    from torch import Tensor


def sppo(outputs: LossInputs, batch: Mapping[str, Tensor], counts: Counts, *, eta: float = 1.0) -> LossResult:
    """``(log pi(y|x) / pi_t(y|x) - eta (P - 1/2))^2``, the mean over responses; 1/2 stands for the log-partition / eta.

    Wu et al. 2024 (arXiv:2405.00675), algorithm 1. The log-ratio is the sum over the tokens of y.

    Args:
        outputs: ``log_probs`` (rows, response), in nats.
        batch: ``response_mask`` and ``old_log_probs``, those of the opponent pi_t (rows, response); ``win_rate``, P
            (rows,). A row without a selected token adds nothing.
        counts: of the whole mini-batch.
        eta: step of the game, in nats.

    Returns:
        the share, and the metrics ``log_ratio_win`` and ``log_ratio_loss``: mean log-ratios, in nats, of responses
        with P above and below 1/2.
    """
    mask, win_rate = batch["response_mask"], batch["win_rate"]
    log_ratio = masked_sum(outputs.require("log_probs") - batch["old_log_probs"], mask, dim=-1)
    counted = (mask != 0).any(dim=-1)
    target = eta * fill_masked(win_rate - 0.5, counted)  # of a row without tokens, 0, as its log-ratio
    loss = (log_ratio - target).square().sum() / max(counts.sequences, 1)
    metrics = {
        f"log_ratio_{name}": Mean(masked_sum(log_ratio.detach(), chosen), chosen.sum())
        for name, chosen in (("win", target > 0), ("loss", target < 0))
    }
    return LossResult(loss=loss, metrics=metrics)
