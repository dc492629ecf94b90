"""Reductions over the positions that a mask selects, and over the rows of a group.

Whatever stands at the other positions, NaN and inf included, changes neither a value nor a gradient: it is selected
away, never multiplied away, and its gradient is exactly zero. `values` and `mask` have one shape, (batch, response) as
a rule (ValueError if they differ); a mask is bool or numeric, and non-zero selects. `dim=None` reduces over everything.
Nothing selected gives 0, never NaN.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import torch
from torch import Tensor


def fill_masked(values: Tensor, mask: Tensor, fill: float = 0.0) -> Tensor:
    """`values` where `mask` selects, else `fill`. For what goes into a function: what comes out has a NaN gradient."""
    if values.shape != mask.shape:
        raise ValueError(f"values {tuple(values.shape)} and mask {tuple(mask.shape)} differ in shape")
    return torch.where(mask != 0, values, fill)


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """sum_t m_t x_t."""
    return fill_masked(values, mask).sum(dim=dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """sum_t m_t x_t / n with n = sum_t m_t."""
    return masked_sum(values, mask, dim) / (mask != 0).sum(dim=dim).clamp(min=1)


def masked_var(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """sum_t m_t (x_t - mean)^2 / (n - 1); one selected value has variance 0."""
    mean = fill_masked(values, mask).sum(dim=dim, keepdim=True) / (mask != 0).sum(dim=dim, keepdim=True).clamp(min=1)
    squares = fill_masked(values - mean, mask).square().sum(dim=dim)
    return squares / ((mask != 0).sum(dim=dim) - 1).clamp(min=1)


def masked_std(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """sqrt(masked_var); where the variance is 0 the gradient is 0 as well."""
    variance = masked_var(values, mask, dim)
    varies = variance > 0
    return torch.where(varies, torch.where(varies, variance, 1.0).sqrt(), 0.0)


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True, epsilon: float = 1e-8) -> Tensor:
    """(x - mean) / sqrt(var + epsilon), plus mean without `shift_mean`, over all selected values; 0 elsewhere."""
    mean = masked_mean(values, mask)
    whitened = fill_masked(values - mean, mask) * torch.rsqrt(masked_var(values, mask) + epsilon)
    return whitened if shift_mean else fill_masked(whitened + mean, mask)


def group_index(uids: Iterable[Hashable] | Tensor) -> Tensor:
    """(batch,) int64 group numbers 0, 1, ... in order of first appearance; equal uids share a number."""
    numbers: dict[Hashable, int] = {}
    items = uids.tolist() if isinstance(uids, Tensor) else uids
    return torch.tensor([numbers.setdefault(uid, len(numbers)) for uid in items], dtype=torch.long)


def group_mean_std(scores: Tensor, group: Tensor | Iterable[Hashable]) -> tuple[Tensor, Tensor, Tensor]:
    """Per row, its group's mean, its std with n - 1, and its size; each (batch,), the size int64. Detached.

        mean_g = sum_{i in g} s_i / n_g        std_g = sqrt(sum_{i in g} (s_i - mean_g)^2 / (n_g - 1))

    `scores` (batch,) floats, `group` (batch,) integers or any hashables (ValueError if they differ in length). Members
    with equal scores, and a group of one, have std and `scores - mean` of exactly 0.
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
