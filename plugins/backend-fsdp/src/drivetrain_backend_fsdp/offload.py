"""Parts of a model in host memory, while nothing computes with them: pinned where the device is not the host.

On a CPU the same happens between two places of one memory. That saves nothing, and shows that nothing is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from drivetrain import PluginError, RunError, UserError
from drivetrain_backend_fsdp import sharding

if TYPE_CHECKING:
    from drivetrain import Hardware

PARTS = ("parameters", "gradients", "optimizer")
BUCKET_BYTES = 256 * 2**20
SMALLEST_BYTES = 2**20
ALIGNMENT = 16  # bytes, so that a bucket cuts no number


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


class HostPool:
    """Host memory as one space of bytes, in buckets whose sizes are powers of two.

    The allocator of pinned memory rounds up to such sizes, so that one block of the whole size could take double.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._buckets: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        """Size of the space."""
        return sum(map(len, self._buckets))

    def reserve(self, nbytes: int) -> None:
        """Make the space at least that large; what it holds is lost if it grows.

        Raises:
            drivetrain.UserError: there is not as much host memory.
        """
        if nbytes <= self.nbytes:
            return
        self._buckets = []
        try:
            for size in bucket_sizes(nbytes):
                self._buckets.append(torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned))
        except RuntimeError as error:
            self._buckets = []
            raise UserError(f"{nbytes / 2**30:.1f} GiB of host memory are not to be had: {error}", where="backend fsdp",
                            mend="offload less, or allow the process more (locked) memory") from error  # fmt: skip

    def slices(self, start: int, nbytes: int) -> Iterator[Tensor]:
        """That range of the space, in uint8, bucket by bucket."""
        for bucket in self._buckets:
            inside = bucket[min(start, len(bucket)) : start + nbytes]
            if len(inside):
                yield inside
            nbytes -= len(inside)
            start = max(start - len(bucket), 0)
            if not nbytes:
                return


def bucket_sizes(nbytes: int) -> list[int]:
    """Powers of two whose sum is at least ``nbytes``, by less than the smallest size."""
    sizes, rest = [BUCKET_BYTES] * (nbytes // BUCKET_BYTES), nbytes % BUCKET_BYTES
    while rest > 0:
        sizes.append(max(1 << (rest.bit_length() - 1), SMALLEST_BYTES))
        rest -= sizes[-1]
    return sizes


def aligned(nbytes: int) -> int:
    """The size, rounded up to a multiple of :data:`ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Shelf:
    """Where one part of a model is kept while its device memory is free.

    Tensors stay the objects that they are, and so do all views of them: their storages are emptied, and filled again
    with the same bytes. Copies run on a stream of their own, which begins after the work before and ends before the
    work behind, so that the host waits for neither.
    """

    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware
        self._device = hardware.device()
        self._pool = HostPool(pinned=self._device.type != "cpu")
        self._away: list[tuple[torch.UntypedStorage, int]] = []

    @property
    def away(self) -> bool:
        """Whether something is on the shelf."""
        return bool(self._away)

    def put(self, tensors: Sequence[Tensor]) -> None:
        """Copy the storages to the host and free them; nothing happens if the part is away already.

        Tensors without a dimension, such as an optimizer's counters of steps, stay: each would be a copy of 4 bytes.
        """
        if self._away:
            return
        found = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if tensor.dim() and tensor.device.type == self._device.type and storage.nbytes():
                found[storage._cdata] = storage
        storages = [(storage, storage.nbytes()) for storage in found.values()]
        self._pool.reserve(sum(aligned(nbytes) for _, nbytes in storages))
        with self._hardware.stream():
            for device, host in self._pieces(storages):
                host.copy_(device, non_blocking=True)
        for storage, _ in storages:  # memory is given out again to work behind the copies alone
            storage.resize_(0)
        self._away = storages

    def take(self) -> None:
        """Give the storages memory again, and their bytes."""
        for storage, nbytes in self._away:
            storage.resize_(nbytes)
        with self._hardware.stream():
            for device, host in self._pieces(self._away):
                device.copy_(host, non_blocking=True)
        self._away = []

    def _pieces(self, storages: Iterable[tuple[torch.UntypedStorage, int]]) -> Iterator[tuple[Tensor, Tensor]]:
        """Bytes on the device and their places on the host."""
        start = 0
        for storage, nbytes in storages:
            device, at = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage), 0
            for host in self._pool.slices(start, nbytes):
                yield device[at : at + len(host)], host
                at += len(host)
            start += aligned(nbytes)


class Shelves:
    """The parts of a model that can be away.

    Args:
        role: of the model, for messages.
    """

    def __init__(self, role: str, hardware: Hardware) -> None:
        self._role, self._hardware = role, hardware
        self._shelves = {name: Shelf(hardware) for name in PARTS}

    def put(self, parts: Collection[str], model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Move parts to the host; those that are there stay there.

        Raises:
            drivetrain.PluginError: there is no such part.
        """
        for name in self._known(parts):
            if name == "parameters":
                _own_storages(model)
            self._shelves[name].put(part(name, model, optimizer))
        self._hardware.empty_cache()  # for others on the device, which cannot use what torch has cached

    def take(self, parts: Collection[str]) -> None:
        """Bring parts back; those that are on the device stay there."""
        for name in self._known(parts):
            self._shelves[name].take()

    def need(self, *parts: str) -> None:
        """Raise RunError if one of the parts is away: its tensors have no memory."""
        if away := [name for name in parts if self._shelves[name].away]:
            raise RunError(f"the {' and the '.join(away)} of role {self._role!r} are in host memory",
                           where="backend fsdp", mend="call onload first")  # fmt: skip

    @staticmethod
    def _known(parts: Collection[str]) -> list[str]:
        if unknown := set(parts) - set(PARTS):
            raise PluginError(f"backend fsdp has no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
        return [name for name in PARTS if name in parts]


def _own_storages(model: nn.Module) -> None:
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
            largest = min(self._pool.nbytes, BUCKET_BYTES)
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
