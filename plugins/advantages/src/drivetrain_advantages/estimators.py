"""Advantages without a critic: what a response's reward is compared with.

`batch` holds `token_level_rewards` and `response_mask`, (rows, response); `group` (rows,) numbers each row's prompt.
s_i = sum_t m_it r_it is the reward of a response, whatever the policy was charged for the KL divergence included. Every
selected token of a response has its advantage, unless the formula has a t. Rows without a selected token are no members
of their group. Results are detached, of the rewards' dtype, and exactly 0 beyond the mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drivetrain.numerics import (
    discounted_returns,
    fill_masked,
    group_advantage,
    group_mean_std,
    masked_sum,
    masked_whiten,
)
from drivetrain.numerics.loss import Batch


def dr_grpo(batch: Batch, group: Tensor) -> Tensor:
    """A_i = s_i - mean_g. Dr. GRPO, Liu et al. 2025 (arXiv:2503.20783), section 3.2. Scope: group.

    A group of one, or of equal rewards, has advantage 0.
    """
    return group_advantage(batch, group, normalize_by_std=False)


def rloo(batch: Batch, group: Tensor) -> Tensor:
    """A_i = s_i - sum_{j in g, j != i} s_j / (n_g - 1). RLOO, Ahmadian et al. 2024 (arXiv:2402.14740). Scope: group.

    A group of one has no other response to be compared with and, as one of equal rewards, has advantage 0.
    """
    rows, scores, group = _members(batch, group)
    mean, _, size = group_mean_std(scores, group)
    return _on_tokens(batch, rows, (scores - mean) * size / (size - 1).clamp(min=1))


def reinforce_plus_plus(batch: Batch, group: Tensor, *, gamma: float = 1.0) -> tuple[Tensor, Tensor]:
    """A_it = (G_it - mean) / sqrt(var + 1e-8), G_it = r_it + gamma G_it', t' the next selected token; and G.

    Mean and variance (n - 1) are over all selected tokens of the batch; `group` is unused. REINFORCE++, Hu et al. 2025
    (arXiv:2501.03262v9), equations 4 and 5, where gamma is 1. Scope: batch. A batch of one selected token has advantage
    0. ValueError: gamma outside [0, 1].
    """
    mask = batch["response_mask"]
    returns = discounted_returns(batch["token_level_rewards"], mask, gamma)
    return masked_whiten(returns, mask), returns


def reinforce_plus_plus_baseline(batch: Batch, group: Tensor) -> Tensor:
    """A_i = (a_i - mean) / sqrt(var + 1e-8) with a_i = s_i - mean_g; mean and variance (n - 1) as above, over tokens.

    REINFORCE++ with baseline, Hu et al. 2025 (arXiv:2501.03262v9), equations 6 and 7. Scope: batch. A group of one has
    a_i = 0; where a_i = 0 all over the batch, advantages are 0.
    """
    return masked_whiten(dr_grpo(batch, group), batch["response_mask"])


def remax(batch: Batch, group: Tensor) -> Tensor:
    """A_it = sum_{u >= t} m_iu r_iu - b_i, with b_i = `reward_baselines` (rows,) the reward of the greedy response.

    ReMax, Li et al. 2023 (arXiv:2310.10505), algorithm 1: with the reward at the last token, A_it = s_i - b_i. Scope:
    sequence; `group` is unused.
    """
    mask = batch["response_mask"]
    returns = discounted_returns(batch["token_level_rewards"], mask, 1.0)
    return fill_masked(returns - batch["reward_baselines"].detach().to(returns).unsqueeze(-1), mask)


def gpg(batch: Batch, group: Tensor, *, f_norm: float = 1.0) -> Tensor:
    """A_i = alpha (s_i - mean_g) / f_norm with alpha = B / (B - M).

    B counts the responses of the batch, and M those in groups whose rewards are all equal, which have no gradient.
    GPG, Chu et al. 2025 (arXiv:2504.02546v3), equations 6 to 8. Scope: batch, for the sake of alpha. A group of one, or
    of equal rewards, has advantage 0. ValueError: f_norm not above 0.
    """
    if f_norm <= 0:
        raise ValueError(f"f_norm must be above 0; got {f_norm}")
    rows, scores, group = _members(batch, group)
    mean, std, _ = group_mean_std(scores, group)
    alpha = len(rows) / max(int((std > 0).sum()), 1)
    return _on_tokens(batch, rows, alpha * (scores - mean) / f_norm)


def pass_at_k(batch: Batch, group: Tensor, *, k: int = 4, threshold: float = 0.5) -> Tensor:
    """Advantages of the reward "one of k responses is right", in closed form; a response is right if s_i > threshold.

        R = 1 - C(n_wrong, k) / C(n, k)      sigma = sqrt(R (1 - R))
        A_right = (1 - R) / sigma            A_wrong = (1 - R - C(n_wrong - 1, k - 1) / C(n - 1, k - 1)) / sigma

    R and sigma are mean and standard deviation over all subsets of k of the group's n responses; A is the mean over the
    subsets that the response is in. Pass@k Training, Chen et al. 2025 (arXiv:2508.10751), section 2.4. Scope: group.
    Where all subsets are alike (sigma = 0), and in a group of fewer than k members, advantages are 0. ValueError: k
    below 1, or above the number of rows of every group.
    """
    if k < 1 or (len(group) and k > int(torch.bincount(group).max())):
        raise ValueError(f"pass_at_k: k must be at least 1, and at most the number of responses to a prompt; got {k}")
    rows, scores, group = _members(batch, group)
    right = (scores > threshold).to(torch.float64)
    mean, _, size = group_mean_std(right, group)
    wrong = (size * (1 - mean)).round()
    others = torch.ones_like(wrong)  # C(n_wrong - 1, k - 1) / C(n - 1, k - 1)
    for taken in range(1, k):
        others = others * (wrong - taken).clamp(min=0) / (size - taken).clamp(min=1)
    none_right = others * wrong / size  # C(n_wrong, k) / C(n, k), which is 1 - R
    sigma = (none_right * (1 - none_right)).sqrt()
    raw = torch.where(right > 0, none_right, none_right - others)
    advantage = torch.where((sigma > 0) & (size >= k), raw / sigma, 0.0)
    return _on_tokens(batch, rows, advantage.to(scores.dtype))


def _members(batch: Batch, group: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The rows that have a selected token, by number; their rewards s_i; their groups."""
    mask = batch["response_mask"]
    rows = (mask != 0).any(dim=-1).nonzero().squeeze(-1)
    scores = masked_sum(batch["token_level_rewards"].detach(), mask, dim=-1)
    return rows, scores[rows], group.to(rows.device)[rows]


def _on_tokens(batch: Batch, rows: Tensor, values: Tensor) -> Tensor:
    """`values` of these rows at each selected token, and 0 elsewhere."""
    mask = batch["response_mask"]
    of_rows = values.new_zeros(len(mask)).index_copy(0, rows, values)
    return fill_masked(of_rows.unsqueeze(-1).expand(mask.shape), mask)
