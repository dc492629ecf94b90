"""The transport ``ipc``: processes of one node see the sender's buffers, and nothing goes through the host of a GPU."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from drivetrain import Meeting, RunError, UserError
from drivetrain.weights import Bucket
from drivetrain_hybrid_engine import headers
from drivetrain_hybrid_engine.announced import Announced

DEVICE = 6
"""Which argument of ``rebuild_cuda_tensor`` is the device's index, in the process that calls it."""


class IPC(Announced):
    """A sender has a buffer for each bucket that is there at once, and shares it when it is made.

    On a GPU receivers open its handle; on a CPU buffer and views are one file that is mapped into memory, in the
    folder for temporary files.
    """

    name = "ipc"

    def __init__(self, meeting: Meeting) -> None:
        """Raises UserError where the memory of this kind of device cannot be shared."""
        super().__init__(meeting)
        self._device = meeting.hardware.device()
        if self._device.type not in ("cpu", "cuda"):
            raise UserError(f"memory of a {self._device.type} cannot be shared between processes", where=self._where,
                            mend="choose another transport")  # fmt: skip
        self._made = 0  # buffers
        self._buffers: dict[int, tuple[int, Tensor]] = {}  # by place: which one, and a view of it
        self._files: TemporaryDirectory[str] | None = None

    def put(self, place: int, bucket: Bucket) -> int:
        size = max(headers.room(bucket), headers.ALIGNMENT)
        if place not in self._buffers or len(self._buffers[place][1]) < size:
            self._buffers.pop(place, None)
            self._buffers[place] = self._made, self._shared(self._made, size)
            self._made += 1
        number, buffer = self._buffers[place]
        headers.fill(buffer, bucket)
        return number

    def take(self, place: int, header: dict[str, Any]) -> list[Tensor]:
        number = header["at"]
        if place not in self._buffers or self._buffers[place][0] != number:
            self._buffers.pop(place, None)
            self._buffers[place] = number, self._opened(number)
        return headers.parts(header, self._buffers[place][1])

    def _shared(self, number: int, size: int) -> Tensor:
        """A new buffer (bytes,); each receiver finds a handle of its own in the store, for a GPU counts who has one."""
        if self._device.type == "cpu":
            self._files = self._files or TemporaryDirectory(prefix="weights-")
            path = Path(self._files.name, str(number))
            buffer = _mapped(path, size)
            handles: list[Any] = [(str(path), size)] * (self._meeting.size - 1)
        else:
            buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
            uuid = self._meeting.hardware.device_uuid()
            handles = [(uuid, reduce_tensor(buffer)[1]) for _ in range(1, self._meeting.size)]
        for rank, handle in enumerate(handles, start=1):
            self._meeting.store.set(f"buffer/{number}/{rank}", pickle.dumps(handle).hex())
        return buffer

    def _opened(self, number: int) -> Tensor:
        key = f"buffer/{number}/{self._meeting.rank}"
        handle: Any = pickle.loads(bytes.fromhex(self._heard(key).decode()))
        self._meeting.store.delete_key(key)
        if self._device.type == "cpu":
            return torch.from_file(handle[0], shared=True, size=handle[1], dtype=torch.uint8)
        uuid, arguments = handle[0], list(handle[1])
        hardware = self._meeting.hardware
        local = [index for index in range(hardware.detect()) if hardware.device_uuid(index) == uuid]
        if not local:
            raise UserError(f"this process does not see device {uuid}, which the weights are on", where=self._where,
                            mend="have both ends see the devices of the node, or choose another transport")  # fmt: skip
        arguments[DEVICE] = local[0]
        opened: Tensor = rebuild_cuda_tensor(*arguments)
        return opened


def _mapped(path: Path, size: int) -> Tensor:
    """A new file (bytes,) in memory; room is taken at once, for a full disk ends the process later."""
    try:
        with path.open("xb") as file:
            if hasattr(os, "posix_fallocate"):  # on Linux; elsewhere the file grows where it is mapped
                os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        raise RunError(f"no room for {size} bytes of weights: {error}", where=str(path.parent),
                       mend="set TMPDIR to a folder that has it") from error  # fmt: skip
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
