"""Parts of a model in host memory, while nothing computes with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from drivetrain_backend_common import host_memory
from drivetrain_backend_common.host_memory import HostPool, aligned
from drivetrain_backend_fsdp import sharding

if TYPE_CHECKING:
    from drivetrain import Hardware

PARTS = ("parameters", "gradients", "optimizer")


def part(name: str, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> list[Tensor]:
    """The tensors of a part; where the model is sharded, this rank's."""
    if name == "parameters":
        found: Iterable[Any] = model.parameters()
    elif name == "gradients":
        found = (parameter.grad for parameter in model.parameters())
    else:
        states = [] if optimizer is None else optimizer.state.values()
        found = (value for state in states for value in state.values())
    return [sharding.local(tensor)[0] for tensor in found if isinstance(tensor, Tensor)]


def own_storages(model: nn.Module) -> None:
    """Give parameters memory that can be freed: on a CPU they may be the mapped file that they were read from."""
    for parameter in model.parameters():
        if not sharding.local(parameter)[0].untyped_storage().resizable():
            parameter.data = parameter.data.clone()


class HostGradients:
    """Sums of gradients over micro-batches in host memory, so that the device has room for activations.

    The additions are those that autograd would make, in the same order and dtype.
    """

    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware
        self._device = hardware.device()
        self._pinned = self._device.type != "cpu"
        self._pool = HostPool(pinned=self._pinned)
        self._stages: list[Tensor] = []
        self._summed: set[int] = set()  # the parameters, by place, that have a sum

    def clear(self) -> None:
        """Begin an update."""
        self._summed.clear()

    def put(self, parameters: Sequence[nn.Parameter]) -> None:
        """Add the gradients to the sums, and free them. ``parameters`` are the same in all calls."""
        self._pool.reserve(sum(aligned(_nbytes(parameter)) for parameter in parameters))
        if not self._stages and self._pool.nbytes:
            largest = min(self._pool.nbytes, host_memory.BUCKET_BYTES)
            self._stages = [torch.empty(largest, dtype=torch.uint8, pin_memory=self._pinned) for _ in range(2)]
        with self._hardware.stream():
            self._add(parameters)
        for number, parameter in enumerate(parameters):
            if parameter.grad is not None:
                self._summed.add(number)
                parameter.grad = None

    def take(self, parameters: Sequence[nn.Parameter]) -> None:
        """Add the sums to what gradients there are on the device."""
        for number, parameter, sums in self._places(parameters):
            if number not in self._summed:
                continue
            before = parameter.grad is not None
            if not before:
                parameter.grad = torch.empty_like(parameter)
            for device, host in _pieces(_flat(parameter), sums):
                if before:
                    device.add_(host.to(self._device, non_blocking=True))
                else:
                    device.copy_(host, non_blocking=True)
        self.clear()

    def _add(self, parameters: Sequence[nn.Parameter]) -> None:
        """Copy first gradients; of later ones, copy one piece while the host adds the one before."""
        turn, adding = 0, None
        for number, parameter, sums in self._places(parameters):
            if parameter.grad is None:
                continue
            for device, host in _pieces(_flat(parameter), sums):
                if number not in self._summed:
                    host.copy_(device, non_blocking=True)
                    continue
                stage, turn = self._stages[turn][: host.nbytes].view(host.dtype), 1 - turn
                stage.copy_(device, non_blocking=True)
                copied = self._hardware.event()
                copied.record()
                if adding is not None:
                    adding[0].synchronize()
                    adding[1].add_(adding[2])
                adding = copied, host, stage
        done = self._hardware.event()
        done.record()
        done.synchronize()
        if adding is not None:
            adding[1].add_(adding[2])

    def _places(self, parameters: Sequence[nn.Parameter]) -> Iterator[tuple[int, nn.Parameter, Iterator[Tensor]]]:
        start = 0
        for number, parameter in enumerate(parameters):
            nbytes = _nbytes(parameter)
            yield number, parameter, self._pool.slices(start, nbytes)
            start += aligned(nbytes)


def _nbytes(parameter: nn.Parameter) -> int:
    return sharding.local(parameter)[0].nbytes


def _flat(parameter: nn.Parameter) -> Tensor:
    """This rank's gradient ``(numbers,)``, as it lies in memory."""
    assert parameter.grad is not None
    if not parameter.grad.is_contiguous():
        parameter.grad = parameter.grad.contiguous()
    return sharding.local(parameter.grad)[0].view(-1)


def _pieces(device: Tensor, places: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    at = 0
    for place in places:
        host = place.view(device.dtype)
        yield device[at : at + len(host)], host
        at += len(host)


def spill(layers: Iterable[nn.Module], *, pinned: bool) -> None:
    """Let each layer keep on the host what it saves for the backward pass; its parameters stay.

    With recomputation that is the layer's input alone. The copies are in line with the computation.
    """
    for layer in layers:
        layer.forward = _spilled(layer, layer.forward, pinned)  # type: ignore[method-assign]


def _spilled(layer: nn.Module, forward: Callable[..., Any], pinned: bool) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        own = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}

        def pack(tensor: Tensor) -> Any:
            if tensor.untyped_storage().data_ptr() in own:
                return tensor
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
            host.copy_(tensor, non_blocking=pinned)
            return tensor.device, host

        def unpack(packed: Any) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            device, host = packed
            restored: Tensor = host.to(device, non_blocking=pinned)
            return restored

        with saved_tensors_hooks(pack, unpack):
            return forward(*args, **kwargs)

    return wrapped
