"""Storages in host memory, while nothing computes with them: pinned where the device is not the host.

On a CPU the same happens between two places of one memory. That saves nothing, and shows that nothing is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from drivetrain import PluginError, RunError, UserError

if TYPE_CHECKING:
    from drivetrain import BackendContext, Hardware

BUCKET_BYTES = 256 * 2**20
SMALLEST_BYTES = 2**20
ALIGNMENT = 16  # bytes, so that a bucket cuts no number


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
            raise UserError(f"{nbytes / 2**30:.1f} GiB of host memory are not to be had: {error}", where="host memory",
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
        backend: its name, for messages.
        parts: their names.
        find: gives the tensors of a part on this rank.
    """

    def __init__(
        self, backend: str, context: BackendContext, parts: Sequence[str], find: Callable[[str], Iterable[Tensor]]
    ) -> None:
        self._backend, self._role, self._hardware = backend, context.role, context.hardware
        self._find = find
        self._shelves = {name: Shelf(context.hardware) for name in parts}

    def put(self, parts: Collection[str]) -> None:
        """Move parts to the host; those that are there stay there.

        Raises:
            drivetrain.PluginError: there is no such part.
        """
        for name in self._known(parts):
            self._shelves[name].put(list(self._find(name)))
        self._hardware.empty_cache()  # for others on the device, which cannot use what torch has cached

    def take(self, parts: Collection[str]) -> None:
        """Bring parts back; those that are on the device stay there."""
        for name in self._known(parts):
            self._shelves[name].take()

    def away(self, part: str) -> bool:
        """Whether a part is in host memory."""
        return self._shelves[part].away

    def need(self, *parts: str) -> None:
        """Raise RunError if one of the parts is away: its tensors have no memory."""
        if away := [name for name in parts if self._shelves[name].away]:
            raise RunError(f"role {self._role!r} has its {' and its '.join(away)} in host memory",
                           where=f"backend {self._backend}", mend="call onload first")  # fmt: skip

    def memory(self) -> dict[str, int]:
        """Bytes on the device by part."""
        device = self._hardware.device().type

        def held(tensor: Tensor) -> int:
            return tensor.nbytes if tensor.device.type == device and tensor.untyped_storage().nbytes() else 0

        return {name: sum(map(held, self._find(name))) for name in self._shelves}

    def _known(self, parts: Collection[str]) -> list[str]:
        if unknown := set(parts) - set(self._shelves):
            raise PluginError(f"backend {self._backend} has no part {', '.join(sorted(unknown))} to move; there are"
                              f" {', '.join(self._shelves)}")  # fmt: skip
        return [name for name in self._shelves if name in parts]
