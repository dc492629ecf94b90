"""Statistics of the rows that share a prompt."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import torch
from torch import Tensor


def group_index(uids: Iterable[Hashable] | Tensor) -> Tensor:
    """(batch,) int64 group numbers 0, 1, ... in order of first appearance; equal uids share a number.

    `uids` is any iterable of hashables (a list, a numpy array of objects) or a 1-d tensor.
    """
    numbers: dict[Hashable, int] = {}
    items = uids.tolist() if isinstance(uids, Tensor) else uids
    return torch.tensor([numbers.setdefault(uid, len(numbers)) for uid in items], dtype=torch.long)


def group_mean_std(scores: Tensor, group: Tensor | Iterable[Hashable]) -> tuple[Tensor, Tensor, Tensor]:
    """Per row, its group's mean, its std with n - 1, and its size; each (batch,), the size int64. Detached.

        mean_g = sum_{i in g} s_i / n_g        std_g = sqrt(sum_{i in g} (s_i - mean_g)^2 / (n_g - 1))

    `scores` (batch,) floats, `group` (batch,) integers or any hashables. A group of one has std 0 and its own score as
    mean; members with equal scores have std and `scores - mean` of exactly 0, in every dtype. ValueError: `scores` and
    `group` differ in length.
    """
    scores, index = scores.detach(), group_index(group).to(scores.device)
    if index.shape != scores.shape:
        raise ValueError(f"scores {tuple(scores.shape)} and group {tuple(index.shape)} differ in shape")
    groups = int(index.max()) + 1 if index.numel() else 0

    def total(rows: Tensor) -> Tensor:
        return rows.new_zeros(groups).index_add(0, index, rows)

    size = total(torch.ones_like(index))
    # Sums are of distances to the group's lowest score: rounding can't make equal scores differ from their mean.
    lowest = scores.new_zeros(groups).scatter_reduce(0, index, scores, "amin", include_self=False)
    mean = lowest + total(scores - lowest[index]) / size
    variance = total((scores - mean[index]).square()) / (size - 1).clamp(min=1)
    return mean[index], variance.sqrt()[index], size[index]
