"""Metrics that can be read off any batch."""

from __future__ import annotations

import torch

from drivetrain.numerics import group_index, group_mean_std
from drivetrain.protocol import DataProto


def reward_columns(batch: DataProto) -> dict[str, torch.Tensor]:
    """The weighted total as ``reward``, and each reward by its label, (rows,)."""
    columns = {"reward": batch["scores"]} if "scores" in batch else {}
    return columns | {name: batch[name] for name in batch.keys() if name.startswith("reward/")}


def batch_metrics(batch: DataProto) -> dict[str, float]:
    """Rewards, accuracy, lengths and how responses ended, averaged over the rows, and groups that teach nothing."""
    out = {name: float(column.double().mean()) for name, column in reward_columns(batch).items()}
    if "correct" in batch and not bool(batch["correct"].isnan().any()):
        out["accuracy"] = float(batch["correct"].double().mean())
    if "scores" in batch and "uid" in batch and len(set(batch["uid"].tolist())) < len(batch):
        spread = group_mean_std(batch["scores"], group_index(batch.non_tensor_batch["uid"]))[1]
        out["groups_without_signal"] = float((spread == 0).double().mean())
    lengths = batch["response_mask"].sum(dim=1).double()
    out["response_tokens"] = float(lengths.mean())
    out["response_tokens_max"] = float(lengths.max())
    if "finish_reason" in batch:
        out["truncated"] = float((batch.non_tensor_batch["finish_reason"] == "length").mean())
    return out
