"""Batches of random numbers in the standard columns."""

from __future__ import annotations

import torch
from torch import Tensor

ROWS, RESPONSE, GROUP = 8, 6, 4


def random_columns(seed: int = 0) -> dict[str, Tensor]:
    """Columns of 8 rows in 2 groups of 4, ragged, one of them with an inner masked token: float64, (8, 6) or (8,).

    Rows 2k and 2k + 1 are a pair.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(scale: float = 1.0) -> Tensor:
        return scale * torch.randn(ROWS, RESPONSE, generator=generator, dtype=torch.float64)

    lengths = torch.tensor([6, 3, 1, 4, 5, 2, 6, 4])
    mask = (torch.arange(RESPONSE) < lengths[:, None]).long()
    mask[0, 2] = 0
    log_probs = -draw().abs() - 0.1
    last = mask.cumsum(1).argmax(1)
    rewards = torch.zeros(ROWS, RESPONSE, dtype=torch.float64)
    rewards[torch.arange(ROWS), last] = torch.randn(ROWS, generator=generator, dtype=torch.float64)
    return {
        "response_mask": mask,
        "old_log_probs": log_probs + draw(0.1),
        "ref_log_probs": log_probs + draw(0.1),
        "rollout_log_probs": log_probs + draw(0.1),
        "log_probs": log_probs,
        "entropy": draw().abs(),
        "values": draw(),
        "returns": draw(),
        "advantages": draw(),
        "token_level_scores": rewards,
        "token_level_rewards": rewards,
        "reward_baselines": draw()[:, 0],
        "win_rate": torch.rand(ROWS, generator=generator, dtype=torch.float64),
        "preference": torch.tensor([1.0, -1.0] * (ROWS // 2), dtype=torch.float64),
        "loss_group": torch.arange(ROWS) // 2,
    }


def groups() -> Tensor:
    """The group of each row, (8,)."""
    return torch.arange(ROWS) // GROUP


def spoiled(column: Tensor, mask: Tensor) -> Tensor:
    """The column with NaN wherever the mask is 0; one value a row stays."""
    spoils = column.is_floating_point() and column.dim() > 1
    return torch.where(mask != 0, column, torch.nan) if spoils else column


def padded(column: Tensor, width: int = 3) -> Tensor:
    """The column with this many positions more on the right; one value a row stays."""
    return torch.nn.functional.pad(column, (0, width)) if column.dim() > 1 else column
