"""The norm of gradients, and its limit, where some parameters are sharded and others are not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from drivetrain_backend_fsdp.sharding import alike, whole


def total_norm(parameters: Sequence[nn.Parameter]) -> float:
    """The 2-norm of all gradients as one vector: a collective call where some are sharded.

    Gradients that are not sharded are the same on all ranks, and count once.
    """
    grads = alike(cast(Tensor, parameter.grad) for parameter in parameters)
    return math.hypot(*(float(whole(torch.nn.utils.get_total_norm(group))) for group in grads))


def clip(parameters: Sequence[nn.Parameter], max_norm: float, norm: float) -> None:
    """Scale gradients of this norm down to ``max_norm``, in place."""
    for group in alike(parameters):
        torch.nn.utils.clip_grads_with_norm_(group, max_norm, torch.tensor(norm))
