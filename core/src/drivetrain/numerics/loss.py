"""What every loss term is made of: what it is computed from, what it is divided by, and how it is summed in shares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from drivetrain.metrics import Metric
from drivetrain.numerics.masked import masked_mean, masked_sum

Batch = Mapping[str, Tensor]
AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What a loss is divided by: the size of the whole mini-batch, over all ranks and micro-batches.

    Rows without a selected token (aborted samples, rows that even out ranks) do not count: adding them changes no loss.
    """

    tokens: int  # selected positions of the response mask
    sequences: int  # rows with a selected token
    groups: int  # distinct groups among these rows

    @classmethod
    def of(cls, response_mask: Tensor, group: Tensor | None = None) -> Counts:
        """Of a whole mini-batch: mask (batch, response); group (batch,) integers, or each row is its own. Syncs."""
        selected = response_mask != 0
        rows = selected.any(dim=-1)
        sequences = int(rows.sum())
        groups = sequences if group is None else len(set(group[rows].tolist()))
        return cls(tokens=int(selected.sum()), sequences=sequences, groups=groups)


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """What a model computed for one micro-batch, with gradients; each (rows, response), float32 or wider."""

    log_probs: Tensor | None = None  # of each response token, in nats
    entropy: Tensor | None = None  # of the distribution that each response token was drawn from, in nats
    values: Tensor | None = None  # the critic's, before each response token

    def require(self, name: Literal["log_probs", "entropy", "values"]) -> Tensor:
        """The named tensor; ValueError if the model did not compute it."""
        tensor: Tensor | None = getattr(self, name)
        if tensor is None:
            raise ValueError(f"this loss term needs {name}, which the model did not compute")
        return tensor


@dataclass(frozen=True, kw_only=True)
class LossResult:
    """A term's share for one micro-batch."""

    loss: Tensor  # scalar, already divided by the global counts
    metrics: Mapping[str, Metric] = field(default_factory=dict)


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

    The SUM over any split of the rows is the whole; rows without a selected token add 0 and are not in S. `scale` is a
    constant number of tokens, never the padded width, which would make padding matter. ValueError: unknown `mode`;
    `scale` missing, not positive, or given to a mode without one.
    """
    if mode not in AGGREGATIONS:
        raise ValueError(f"unknown aggregation {mode!r}; choose from {', '.join(AGGREGATIONS)}")
    if mode == "seq-mean-token-sum-norm":
        if scale is None or not scale > 0:
            raise ValueError(f"aggregation {mode!r} needs a positive scale, in tokens; got {scale}")
    elif scale is not None:
        raise ValueError(f"aggregation {mode!r} takes no scale; got {scale}")
    whole = counts or Counts.of(mask)
    if mode == "token-sum":
        return masked_sum(loss, mask)
    if mode == "token-mean":
        return masked_sum(loss, mask) / max(whole.tokens, 1)
    per_row = masked_mean(loss, mask, dim=-1) if mode == "seq-mean-token-mean" else masked_sum(loss, mask, dim=-1)
    return per_row.sum() / (max(whole.sequences, 1) * (1.0 if scale is None else scale))
