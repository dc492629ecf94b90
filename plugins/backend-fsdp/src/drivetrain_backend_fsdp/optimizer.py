"""The optimizer ``adamw``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import nn

from drivetrain import UserError
from drivetrain_backend_fsdp.sharding import alike

if TYPE_CHECKING:
    from drivetrain_backend_fsdp.config import AdamWConfig


def adamw(parameters: Iterable[tuple[str, nn.Parameter]], config: AdamWConfig) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) over named parameters.

    Weight decay applies to parameters of two and more dimensions; norms and biases, which have one, keep their size.
    The moments have the dtype of the parameter. Unless ``fused`` is set, the fused kernel is used where the device has
    one.

    Raises:
        drivetrain.UserError: ``fused`` is true, and there is no fused kernel for the device or the dtype.
    """
    trainable = [parameter for _, parameter in parameters if parameter.requires_grad]
    groups = [
        {"params": group, "weight_decay": decay}
        for decay, chosen in (
            (config.weight_decay, [p for p in trainable if p.dim() >= 2]),
            (0.0, [p for p in trainable if p.dim() < 2]),
        )
        for group in alike(chosen)
    ]
    fused = config.fused
    if fused is not False:
        cause = next(filter(None, map(_no_fused_kernel, {(p.device, p.dtype) for p in trainable})), None)
        if fused and cause:
            raise UserError(f"there is no fused AdamW here: {cause}", where="optimizer.fused",
                            mend="leave it out, or set it to false")  # fmt: skip
        fused = cause is None
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused or None)


def _no_fused_kernel(kind: tuple[torch.device, torch.dtype]) -> RuntimeError | None:
    """Why parameters of a device and dtype have no fused kernel; tells by a step of one of them."""
    probe = nn.Parameter(torch.zeros(1, device=kind[0], dtype=kind[1]))
    probe.grad = torch.zeros_like(probe)
    try:
        torch.optim.AdamW([probe], fused=True).step()
    except RuntimeError as error:
        return error
    return None
