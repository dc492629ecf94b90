"""The loss of preference pairs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import logsigmoid

from drivetrain.metrics import Mean
from drivetrain.numerics import Counts, LossInputs, LossResult, masked_sum

if TYPE_CHECKING:
    from torch import Tensor


def dpo(
    outputs: LossInputs, batch: Mapping[str, Tensor], counts: Counts, *, beta: float = 0.1, kind: str = "sigmoid",
    label_smoothing: float = 0.0,
) -> LossResult:  # fmt: skip
    """The mean over pairs of a loss of their margin. With y the better and y' the worse response to x,

        margin   = (log pi(y|x) - log pi_ref(y|x)) - (log pi(y'|x) - log pi_ref(y'|x)),      log pi a sum over tokens
        sigmoid  = -(1 - e) log sigmoid(beta margin) - e log sigmoid(-beta margin),          e = `label_smoothing`
        ipo      = (margin - 1 / (2 beta))^2
        hinge    = max(0, 1 - beta margin)

    sigmoid: Rafailov et al. 2023 (arXiv:2305.18290), equation 7; e > 0: conservative DPO (Mitchell 2023, A note on DPO
    with noisy preferences). ipo: Azar et al. 2023 (arXiv:2310.12036), equation 17, beta their tau. hinge: SLiC's loss
    (arXiv:2305.10425) of the log-ratios, Liu et al. 2023 (arXiv:2309.06657), equation 6.

    Args:
        outputs: ``log_probs`` (rows, response).
        batch: ``response_mask``, ``ref_log_probs`` (rows, response); ``loss_group`` (rows,), which the two rows of a
            pair share; ``preference`` (rows,), 1 for the better and -1 for the worse.
        counts: of the whole mini-batch, whose groups are the pairs. A pair without any selected token counts nowhere.

    Returns:
        the share; means over pairs: ``preference_accuracy`` (margin above 0), ``margin``, ``chosen_log_ratio`` and
        ``rejected_log_ratio`` (of log pi - log pi_ref, in nats; beta times that is the implicit reward).

    Raises:
        ValueError: for a bad option, and if one row of a pair is missing.
    """
    if kind not in ("sigmoid", "ipo", "hinge") or not beta > 0 or (label_smoothing and kind != "sigmoid"):
        raise ValueError(f"no loss of pairs: kind {kind!r} with beta {beta} and label_smoothing {label_smoothing}")
    mask, preference = batch["response_mask"], batch["preference"]
    log_ratio = masked_sum(outputs.require("log_probs") - batch["ref_log_probs"], mask, dim=-1)
    pair = torch.unique(batch["loss_group"], return_inverse=True)[1]

    def over_rows(values: Tensor) -> Tensor:
        """Sums over the rows of each pair; there are at most as many pairs as rows."""
        return torch.zeros_like(log_ratio).index_add(0, pair, values.to(log_ratio.dtype))

    learnt = over_rows((mask != 0).any(dim=-1)) > 0
    sides = [over_rows(preference > 0) > 0, over_rows(preference < 0) > 0]
    if bool((learnt & ~(sides[0] & sides[1])).any()):
        raise ValueError("a pair has no better or no worse response; were its rows separated?")
    margin = over_rows(preference * log_ratio)[learnt]
    if kind == "sigmoid":
        losses = -(1 - label_smoothing) * logsigmoid(beta * margin) - label_smoothing * logsigmoid(-beta * margin)
    else:
        losses = (margin - 1 / (2 * beta)).square() if kind == "ipo" else (1 - beta * margin).clamp(min=0)
    pairs = learnt.sum()
    metrics = {
        "preference_accuracy": Mean((margin > 0).sum(), pairs),
        "margin": Mean(margin.sum(), pairs),
        "chosen_log_ratio": Mean(log_ratio[preference > 0].sum(), pairs),
        "rejected_log_ratio": Mean(log_ratio[preference < 0].sum(), pairs),
    }
    return LossResult(loss=losses.sum() / max(counts.groups, 1), metrics=metrics)
