"""The parts of a model that can be in host memory while nothing computes with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from drivetrain_backend_megatron.optimizer import Optimizer

PARTS = ("parameters", "optimizer")


def part(name: str, model: Mapping[str, Tensor], optimizer: Optimizer | None) -> list[Tensor]:
    """The tensors of a part on this rank; a float32 copy of a parameter belongs to the optimizer, a view does not."""
    if name == "parameters":
        return list(model.values())
    own = {tensor.untyped_storage()._cdata for tensor in model.values()}
    found: list[Tensor] = []
    for _, parameter, moments in optimizer.held() if optimizer is not None else ():
        found += [value for value in moments.values() if isinstance(value, Tensor)]
        if parameter.untyped_storage()._cdata not in own:
            found.append(parameter)
    return found
