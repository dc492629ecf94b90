"""Advantages of a batch, by the name of their estimator."""

from __future__ import annotations

from typing import Any

import torch

from drivetrain.numerics import group_index
from drivetrain.protocol import DataProto
from drivetrain.seam.registry import resolve


def compute_advantage(batch: DataProto, estimator: str = "gae", **options: Any) -> DataProto:
    """Add ``advantages`` and ``returns`` (rows, response) to a batch.

    Args:
        batch: with ``response_mask``, and with ``token_level_rewards`` or, if those are missing,
            ``token_level_scores``; estimators may need more, such as ``values``. Rows of one ``uid`` are a group.
        estimator: a name offered by the hook ``advantage_estimators``.
        options: of the estimator, such as ``gamma`` and ``lam``.

    Returns:
        a new batch; an estimator that gives no returns has them equal to its advantages.
    """
    if "token_level_rewards" not in batch:
        batch = batch.with_columns(token_level_rewards=batch["token_level_scores"])
    uids = batch.non_tensor_batch["uid"] if "uid" in batch.non_tensor_batch else torch.arange(len(batch))
    result = resolve("advantage_estimators", estimator)(batch.batch, group_index(uids), **options)
    advantages, returns = result if isinstance(result, tuple) else (result, result)
    return batch.with_columns(advantages=advantages, returns=returns)
