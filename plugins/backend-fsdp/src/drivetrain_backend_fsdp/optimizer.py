"""Optimizers that this distribution offers."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from drivetrain_backend_fsdp.config import AdamWConfig


def adamw(parameters: Iterable[tuple[str, nn.Parameter]], config: AdamWConfig) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) over named parameters.

    Weight decay applies to parameters of two and more dimensions; norms and biases, which have one, keep their size.
    The moments have the dtype of the parameter. Uses the fused kernel where the device has one.
    """
    trainable = [parameter for _, parameter in parameters if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    make = partial(torch.optim.AdamW, groups, lr=config.lr, betas=config.betas, eps=config.eps)
    try:
        return make(fused=True)
    except RuntimeError:  # no fused kernel for this device or dtype
        return make()
