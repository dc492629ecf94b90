"""Advantage estimators: from a batch's columns to (batch, response)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from drivetrain.numerics.gae import gae
from drivetrain.numerics.groups import group_mean_std
from drivetrain.numerics.masked import fill_masked, masked_sum


def group_advantage(
    batch: Mapping[str, Tensor], group: Tensor, *, normalize_by_std: bool = True, epsilon: float = 1e-6
) -> Tensor:
    """A_it = (s_i - mean_g) / (std_g + epsilon) with s_i = sum_t m_it r_it; (batch, response), 0 where masked.

    Detached. `batch` holds `token_level_rewards` and `response_mask`, (batch, response); `group` (batch,) numbers each
    row's prompt; mean and std (n - 1) are over the rows of a group. GRPO: Shao et al. 2024 (arXiv:2402.03300), section
    4.1.2. `normalize_by_std=False` leaves out the division: Dr. GRPO, Liu et al. 2025 (arXiv:2503.20783), section 3.2.

    A group of one has nothing to compare with: its advantage is 0, as is that of a group of equal scores. Rows without
    a selected token are no members of their group.
    """
    mask = batch["response_mask"]
    scores = masked_sum(batch["token_level_rewards"].detach(), mask, dim=-1)
    rows = (mask != 0).any(dim=-1)
    mean, std, _ = group_mean_std(scores[rows], group.to(rows.device)[rows])
    centred = scores[rows] - mean
    advantage = scores.new_zeros(scores.shape)
    advantage[rows] = centred / (std + epsilon) if normalize_by_std else centred
    return fill_masked(advantage.unsqueeze(-1).expand(mask.shape), mask)


def gae_advantage(
    batch: Mapping[str, Tensor], group: Tensor, *, gamma: float = 1.0, lam: float = 0.95
) -> tuple[Tensor, Tensor]:
    """Whitened advantages and returns, each (batch, response): see `gae`.

    `batch` holds `token_level_rewards`, `values` and `response_mask`, (batch, response); `group` does not matter.
    """
    return gae(batch["token_level_rewards"], batch["values"], batch["response_mask"], gamma, lam, whiten=True)
