"""Parts of a model in host memory, while nothing computes with them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from drivetrain import PluginError, RunError
from drivetrain_backend_common.host_memory import Shelf

if TYPE_CHECKING:
    from drivetrain import Hardware
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


class Shelves:
    """The parts of a model that can be away.

    Args:
        role: of the model, for messages.
    """

    def __init__(self, role: str, hardware: Hardware) -> None:
        self._role, self._hardware = role, hardware
        self._shelves = {name: Shelf(hardware) for name in PARTS}

    def put(self, parts: Collection[str], model: Mapping[str, Tensor], optimizer: Optimizer | None) -> None:
        """Move parts to the host; those that are there stay there.

        Raises:
            drivetrain.PluginError: there is no such part.
        """
        for name in self._known(parts):
            self._shelves[name].put(part(name, model, optimizer))
        self._hardware.empty_cache()  # for others on the device, which cannot use what torch has cached

    def take(self, parts: Collection[str]) -> None:
        """Bring parts back; those that are on the device stay there."""
        for name in self._known(parts):
            self._shelves[name].take()

    def away(self, name: str) -> bool:
        """Whether a part is in host memory."""
        return bool(self._shelves[name].away)

    def need(self, *parts: str) -> None:
        """Raise RunError if one of the parts is away: its tensors have no memory."""
        if away := [name for name in parts if self._shelves[name].away]:
            raise RunError(f"the {' and the '.join(away)} of role {self._role!r} are in host memory",
                           where="backend megatron", mend="call onload first")  # fmt: skip

    @staticmethod
    def _known(parts: Collection[str]) -> list[str]:
        if unknown := set(parts) - set(PARTS):
            raise PluginError(f"backend megatron moves no {', '.join(sorted(unknown))}; it moves {', '.join(PARTS)}")
        return [name for name in PARTS if name in parts]
