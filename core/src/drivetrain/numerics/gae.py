"""Returns and generalised advantages along each row, without a loop over time.

Time runs over the selected tokens alone: a masked token in between (a tool's output, an observation) is neither a step
nor a discount; what has accumulated to its right passes through it unchanged. Nothing is bootstrapped after the last
selected token: its next value is 0.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from drivetrain.numerics.masked import fill_masked, masked_whiten


def reverse_scan(decay: Tensor, values: Tensor) -> Tensor:
    """x_t = values_t + decay_t x_{t+1}, with x_T = 0, along the last dimension; all shapes (batch, time).

    By doubling (Hillis and Steele, 1986): after k rounds an element holds the affine map of 2^k steps, so there are
    log2(T) rounds of O(batch T) memory. For |decay| <= 1 no intermediate product grows, and decay 0 needs no care as
    nothing is divided.
    """
    step = 1
    while step < values.shape[-1]:
        values = values + decay * pad(values[..., step:], (0, step))
        decay = decay * pad(decay[..., step:], (0, step))
        step *= 2
    return values


def discounted_returns(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """G_t = r_t + gamma G_{t'}, t' the next selected token; (batch, response), exactly 0 where masked. Detached.

    Rewards at masked positions do not count. ValueError: gamma outside [0, 1].
    """
    _check_fraction("gamma", gamma)
    rewards = fill_masked(rewards.detach(), mask)
    return fill_masked(reverse_scan(_decay(gamma, rewards, mask), rewards), mask)


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float, *, whiten: bool = False
) -> tuple[Tensor, Tensor]:
    """Advantages and returns, each (batch, response), exactly 0 where masked. Detached.

        delta_t = r_t + gamma V_{t'} - V_t        A_t = delta_t + gamma lam A_{t'}        return_t = A_t + V_t

    with t' the next selected token. All arguments (batch, response); rewards at masked positions do not count. Schulman
    et al. 2016 (arXiv:1506.02438), equation 16. `whiten` whitens the advantages over this batch's mask, and not the
    returns. ValueError: gamma or lam outside [0, 1].
    """
    _check_fraction("gamma", gamma)
    _check_fraction("lam", lam)
    rewards, values = fill_masked(rewards.detach(), mask), fill_masked(values.detach(), mask)
    upcoming = reverse_scan((mask == 0).to(values), values)  # the value of the first selected token at t or later
    delta = rewards + gamma * pad(upcoming[..., 1:], (0, 1)) - values
    raw = fill_masked(reverse_scan(_decay(gamma * lam, delta, mask), fill_masked(delta, mask)), mask)
    return (masked_whiten(raw, mask) if whiten else raw), raw + values


def _decay(rate: float, like: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask != 0, torch.full_like(like, rate), 1.0)


def _check_fraction(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} must be in [0, 1]; got {value}")
