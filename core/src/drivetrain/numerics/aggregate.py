"""From a loss per token to one number, in shares that add up."""

from __future__ import annotations

from torch import Tensor

from drivetrain.numerics.counts import Counts
from drivetrain.numerics.masked import masked_mean, masked_sum

AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def aggregate(
    loss: Tensor, mask: Tensor, mode: str, counts: Counts | None = None, *, scale: float | None = None
) -> Tensor:
    """This share's part of the aggregated loss: a scalar, already divided by the counts of the whole.

    `loss` and `mask` (rows, response), `counts` those of the whole mini-batch (None: these rows are the whole). With
    l_it the loss of token t in row i, m its mask, n_i the row's selected tokens, and N tokens, S sequences in all:

        token-mean               sum_it m_it l_it / N                    DAPO (arXiv:2503.14476, section 3.3)
        token-sum                sum_it m_it l_it
        seq-mean-token-sum       sum_i (sum_t m_it l_it) / S
        seq-mean-token-mean      sum_i (sum_t m_it l_it / n_i) / S       GRPO (arXiv:2402.03300, equation 3)
        seq-mean-token-sum-norm  sum_i (sum_t m_it l_it) / (S scale)     Dr. GRPO (arXiv:2503.20783, section 3.2)

    Each row's part depends on that row and on the counts alone, so the SUM over any split of the rows is the whole.
    Rows without a selected token add 0 and are not in S; a batch of none but such rows gives 0. `scale` is a constant
    number of tokens, never the padded width, which would make padding matter. ValueError: unknown `mode`; `scale`
    missing, not positive, or given to a mode without one.
    """
    if mode not in AGGREGATIONS:
        raise ValueError(f"unknown aggregation {mode!r}; choose from {', '.join(AGGREGATIONS)}")
    if mode == "seq-mean-token-sum-norm":
        if scale is None or not scale > 0:
            raise ValueError(f"aggregation {mode!r} needs a positive scale, in tokens; got {scale}")
    elif scale is not None:
        raise ValueError(f"aggregation {mode!r} takes no scale; got {scale}")
    whole = Counts.of(mask) if counts is None else counts
    if mode == "token-sum":
        return masked_sum(loss, mask)
    if mode == "token-mean":
        return masked_sum(loss, mask) / max(whole.tokens, 1)
    per_row = masked_mean(loss, mask, dim=-1) if mode == "seq-mean-token-mean" else masked_sum(loss, mask, dim=-1)
    return per_row.sum() / (max(whole.sequences, 1) * (1.0 if scale is None else scale))
