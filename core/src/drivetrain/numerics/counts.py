"""What a loss is divided by: the size of the whole mini-batch, known before any of it is computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Global counts of a mini-batch, over all ranks and micro-batches.

    A row without a selected token (an aborted sample, a row that evens out ranks) holds nothing to learn from: it is no
    token, no sequence and no group, so that adding such rows changes no loss.
    """

    tokens: int
    """selected positions of the response mask"""
    sequences: int
    """rows with a selected token"""
    groups: int
    """distinct groups among these rows"""

    @classmethod
    def of(cls, response_mask: Tensor, group: Tensor | None = None) -> Self:
        """Counts of this batch alone. `response_mask` (batch, response); `group` (batch,) integers, without it each row
        is its own group.

        To be taken of the whole mini-batch, before it is split. Waits for the device.
        """
        selected = response_mask != 0
        rows = selected.any(dim=-1)
        sequences = int(rows.sum())
        groups = sequences if group is None else len(set(group[rows].tolist()))
        return cls(tokens=int(selected.sum()), sequences=sequences, groups=groups)
