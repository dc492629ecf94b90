"""Reductions over the positions that a mask selects. Whatever stands at the other positions, NaN and inf included,
changes neither a value nor a gradient: it is selected away, never multiplied away, and its gradient is exactly zero.

`values` and `mask` have one shape, (batch, response) as a rule (ValueError if they differ); a mask is bool or numeric,
and non-zero selects. `dim=None` reduces over everything. Nothing selected gives 0, never NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor


def fill_masked(values: Tensor, mask: Tensor, fill: float = 0.0) -> Tensor:
    """`values` where `mask` selects, `fill` elsewhere; same shape as `values`.

    To be applied to the inputs of a non-linear function: applied to its result alone, 0 * NaN reaches the gradient.
    """
    return torch.where(_selected(values, mask), values, fill)


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
    """(x - mean) / sqrt(var + epsilon), mean and var (n - 1) over all selected values; exactly 0 where not selected.

    `shift_mean=False` adds the mean back. One selected value whitens to 0, or to itself if the mean is not shifted.
    """
    mean = masked_mean(values, mask)
    whitened = fill_masked(values - mean, mask) * torch.rsqrt(masked_var(values, mask) + epsilon)
    return whitened if shift_mean else fill_masked(whitened + mean, mask)


def _selected(values: Tensor, mask: Tensor) -> Tensor:
    if values.shape != mask.shape:
        raise ValueError(f"values {tuple(values.shape)} and mask {tuple(mask.shape)} differ in shape")
    return mask != 0
