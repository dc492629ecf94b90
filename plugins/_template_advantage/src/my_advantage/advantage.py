"""The advantage estimator my-advantage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from drivetrain.numerics import fill_masked, group_mean_std, masked_sum

if TYPE_CHECKING:
    from torch import Tensor


def bounded(batch: Mapping[str, Tensor], group: Tensor, *, bound: float = 1.0) -> Tensor:
    """``A_it = clip(s_i - mean_g, -bound, bound)``, s_i the sum of a response's rewards, mean_g that of its prompt.

    Args:
        batch: ``token_level_rewards`` and ``response_mask`` (rows, response).
        group: (rows,) integers; rows of one prompt share a number.
        bound: largest advantage.

    Returns:
        advantages (rows, response), zero where the mask is. Rows without a token are no members of their group.
    """
    mask = batch["response_mask"]
    scores = masked_sum(batch["token_level_rewards"], mask, dim=-1)
    rows = (mask != 0).any(dim=-1)
    mean, _, _ = group_mean_std(scores[rows], group.to(rows.device)[rows])
    advantages = scores.new_zeros(scores.shape)
    advantages[rows] = (scores[rows] - mean).clamp(-bound, bound)
    return fill_masked(advantages[:, None].expand(mask.shape), mask)
