"""The norm of gradients, and its limit, where some parameters are sharded and others are not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from drivetrain_backend_fsdp.sharding import alike, copies, local, on_host, reduce, whole


def total_norm(parameters: Sequence[nn.Parameter], device: torch.device) -> float:
    """The 2-norm of all gradients as one vector: a collective call where some are sharded.

    Gradients that are not sharded are the same on all ranks, and count once.
    """
    grads = alike(cast(Tensor, parameter.grad) for parameter in parameters)
    return math.hypot(*(_norm(group, device) for group in grads))


def _norm(grads: Sequence[Tensor], device: torch.device) -> float:
    """Of gradients that are distributed alike."""
    if not on_host(grads[0]):
        return float(whole(torch.nn.utils.get_total_norm(grads)))
    square = float(torch.nn.utils.get_total_norm([local(grad)[0] for grad in grads])) ** 2
    return math.sqrt(reduce(square / copies(grads[0]), device))


def clip(parameters: Sequence[nn.Parameter], max_norm: float, norm: float) -> None:
    """Scale gradients of this norm down to ``max_norm``, in place."""
    for group in alike(parameters):
        torch.nn.utils.clip_grads_with_norm_(group, max_norm, torch.tensor(norm))
