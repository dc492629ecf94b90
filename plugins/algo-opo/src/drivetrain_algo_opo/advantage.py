"""The advantage of OPO."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from drivetrain.numerics import fill_masked, group_index, masked_sum

if TYPE_CHECKING:
    from torch import Tensor


def opo_advantage(batch: Mapping[str, Tensor], group: Tensor) -> Tensor:
    """A_it = r_i - b_g with b_g = sum_{i in g} l_i r_i / sum_{i in g} l_i, the baseline that is optimal if the squared
    norm of a response's gradient grows as its length: Hao et al. 2025 (arXiv:2505.23585).

    Args:
        batch: ``token_level_rewards`` and ``response_mask`` (rows, response); r_i sums the rewards of the tokens that
            the mask selects, and l_i counts these.
        group: (rows,) integers; rows of one prompt share a number.

    Returns:
        (rows, response), exactly 0 where masked, for a group of one and for a group of equal rewards.
    """
    mask = batch["response_mask"]
    index = group_index(group).to(mask.device)
    rewards = masked_sum(batch["token_level_rewards"].detach(), mask, dim=-1)
    lengths = (mask != 0).sum(dim=-1).to(rewards)
    groups = len(set(index.tolist()))
    # Rewards are measured from the lowest of the group: rounding can't make equal ones differ from their baseline.
    present = rewards.masked_fill(lengths == 0, rewards.max() if len(rewards) else 0.0)
    lowest = rewards.new_zeros(groups).scatter_reduce(0, index, present, "amin", include_self=False)
    above = rewards - lowest[index]
    weighted = rewards.new_zeros(groups).index_add(0, index, lengths * above)
    weight = rewards.new_zeros(groups).index_add(0, index, lengths)
    advantage = above - (weighted / weight.clamp(min=1))[index]
    return fill_masked(advantage.unsqueeze(-1).expand(mask.shape), mask)
