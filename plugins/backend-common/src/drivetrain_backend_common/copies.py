"""What a checkpoint is written from: tensors, or copies of them in host memory, all of whose numbers are finite."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from drivetrain import NonFiniteError

Copy = Callable[[str, Tensor], Tensor]
"""Gives what is written of a tensor, of the name under which it is saved."""


def as_it_is(name: str, tensor: Tensor) -> Tensor:
    """The tensor itself, which is to be written before it changes."""
    return tensor


class Copies:
    """Copies in host memory, each in the buffer of the one before; pinned where they come from a device.

    A copy from a device is there when the device has been waited for.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
            pinned = tensor.device.type != "cpu"
            buffer = self._buffers[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
        return buffer.copy_(tensor, non_blocking=True)


def finite(part: Tensor) -> Tensor:
    """Whether all numbers are finite, in one pass and without a mask; a NaN is the least and the largest."""
    if not part.numel():
        return torch.ones((), dtype=torch.bool)
    low, high = part.aminmax()
    return low.isfinite() & high.isfinite()


def check_finite(found: Mapping[str, Tensor]) -> None:
    """Ask for what :func:`finite` gave, by name, when all copies are under way: each answer waits for the device.

    Raises:
        drivetrain.NonFiniteError: a weight or a moment is NaN or infinite.
    """
    for name, yes in found.items():
        if not yes:
            raise NonFiniteError(f"{name} is not finite, so the model is not saved", where="checkpoint",
                                 mend="go on from an earlier checkpoint with a lower learning rate")  # fmt: skip
