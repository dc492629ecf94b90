"""Returns and advantages along each row, without a loop over time.

Time runs over the selected tokens alone: a masked token in between (a tool's output, an observation) is neither a step
nor a discount; what has accumulated to its right passes through it unchanged. The value after the last selected token
is 0. Results are detached, (batch, response) and exactly 0 where masked.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from drivetrain.numerics.loss import Batch
from drivetrain.numerics.masked import fill_masked, group_mean_std, masked_sum, masked_whiten


def reverse_scan(decay: Tensor, values: Tensor) -> Tensor:
    """x_t = values_t + decay_t x_{t+1}, with x_T = 0, along the last dimension; all shapes (batch, time).

    By doubling (Hillis and Steele, 1986): after k rounds an element holds the affine map of 2^k steps.
    """
    step = 1
    while step < values.shape[-1]:
        values = values + decay * pad(values[..., step:], (0, step))
        decay = decay * pad(decay[..., step:], (0, step))
        step *= 2
    return values


def discounted_returns(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """G_t = r_t + gamma G_{t'}, t' the next selected token. ValueError: gamma outside [0, 1]."""
    _check_fraction("gamma", gamma)
    rewards = fill_masked(rewards.detach(), mask)
    return fill_masked(reverse_scan(torch.where(mask != 0, gamma, torch.ones_like(rewards)), rewards), mask)


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float, *, whiten: bool = False
) -> tuple[Tensor, Tensor]:
    """Advantages and returns, with t' the next selected token:

        delta_t = r_t + gamma V_{t'} - V_t        A_t = delta_t + gamma lam A_{t'}        return_t = A_t + V_t

    All arguments (batch, response). Schulman et al. 2016 (arXiv:1506.02438), equation 16. `whiten` whitens the
    advantages over this batch's mask, and not the returns. ValueError: gamma or lam outside [0, 1].
    """
    _check_fraction("gamma", gamma)
    _check_fraction("lam", lam)
    rewards, values = fill_masked(rewards.detach(), mask), fill_masked(values.detach(), mask)
    upcoming = reverse_scan((mask == 0).to(values), values)  # the value of the first selected token at t or later
    delta = rewards + gamma * pad(upcoming[..., 1:], (0, 1)) - values
    decay = torch.where(mask != 0, gamma * lam, torch.ones_like(delta))
    raw = fill_masked(reverse_scan(decay, fill_masked(delta, mask)), mask)
    return (masked_whiten(raw, mask) if whiten else raw), raw + values


def gae_advantage(batch: Batch, group: Tensor, *, gamma: float = 1.0, lam: float = 0.95) -> tuple[Tensor, Tensor]:
    """Whitened advantages and returns by `gae`, of token_level_rewards, values and response_mask; `group` is unused."""
    return gae(batch["token_level_rewards"], batch["values"], batch["response_mask"], gamma, lam, whiten=True)


def group_advantage(batch: Batch, group: Tensor, *, normalize_by_std: bool = True, epsilon: float = 1e-6) -> Tensor:
    """A_it = (s_i - mean_g) / (std_g + epsilon) with s_i = sum_t m_it r_it, and mean and std (n - 1) of a group.

    `batch` holds `token_level_rewards` and `response_mask`; `group` (batch,) numbers each row's prompt. GRPO: Shao et
    al. 2024 (arXiv:2402.03300), section 4.1.2. `normalize_by_std=False` leaves out the division: Dr. GRPO, Liu et al.
    2025 (arXiv:2503.20783), section 3.2. A group of one, or of equal scores, has advantage 0; rows without a selected
    token are no members of their group.
    """
    mask = batch["response_mask"]
    scores = masked_sum(batch["token_level_rewards"].detach(), mask, dim=-1)
    rows = (mask != 0).any(dim=-1)
    mean, std, _ = group_mean_std(scores[rows], group.to(rows.device)[rows])
    centred = scores[rows] - mean
    advantage = scores.new_zeros(scores.shape)
    advantage[rows] = centred / (std + epsilon) if normalize_by_std else centred
    return fill_masked(advantage.unsqueeze(-1).expand(mask.shape), mask)


def _check_fraction(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} must be in [0, 1]; got {value}")
