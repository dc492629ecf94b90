"""The transports ``gloo`` and ``nccl``: one process broadcasts, the others of a meeting receive.

A bucket is three broadcasts: two numbers (bytes of the header and of the payload), the header (JSON: names, dtypes,
shapes, aliases, fingerprints), and all tensors one after the other in a buffer that is used again for every bucket. A
last header says that it is the end, or why it is.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain import RunError, WeightStreamError
from drivetrain.weights import Bucket, WeightStream
from drivetrain_hybrid_engine import headers

if TYPE_CHECKING:
    from drivetrain import Meeting


class Broadcast(ABC):
    """Buckets from rank 0 to all others; rank 0 calls :meth:`send` while the others draw from :meth:`receive`.

    Its group is none of the process's others, which it does not need: those that meet may be of different worlds.
    """

    name: ClassVar[str]

    def __init__(self, meeting: Meeting) -> None:
        """Join a group of the processes that meet."""
        self._rank = meeting.rank
        self._where = f"weight transport {self.name}"
        self._device = self._find_device(meeting)
        self._group: Any = self._join(meeting)
        self._buffer = torch.empty(0, dtype=torch.uint8, device=self._device)

    def send(self, stream: WeightStream) -> None:
        """Broadcast every bucket. An error in drawing one is told to the receivers, and raised."""
        self._must_be(sender=True)
        try:
            for bucket in stream:
                self._send_bucket(bucket)
        except Exception as error:
            with suppress(RunError):  # if that is the error
                self._send_header({"error": f"{type(error).__name__}: {error}"})
            raise
        self._send_header({"end": True})

    def receive(self) -> WeightStream:
        """The buckets, in the order sent. The tensors of a bucket expire when the next one is drawn.

        A receiver that stops in the middle has to draw the rest, or the others of the group wait for it.

        Raises:
            WeightStreamError: when drawn from, if the sender failed.
            RunError: then, too, if a process of the meeting is gone.
        """
        self._must_be(sender=False)
        return WeightStream(self._buckets())

    def _must_be(self, *, sender: bool) -> None:
        if (self._rank == 0) != sender:
            raise RunError(f"rank 0 sends and the others receive; this is rank {self._rank}", where=self._where)

    @abstractmethod
    def _find_device(self, meeting: Meeting) -> torch.device:
        """Where buckets are when they are sent."""

    @abstractmethod
    def _join(self, meeting: Meeting) -> Any:
        """The group, over the store of the meeting."""

    # -- sending ----------------------------------------------------------------------------------------------------

    def _send_bucket(self, bucket: Bucket) -> None:
        size = headers.room(bucket)
        buffer = self._room(size)
        headers.fill(buffer, bucket)
        self._send_header(headers.describe(bucket), payload=size)
        if size:
            self._broadcast(buffer)

    def _send_header(self, header: dict[str, Any], payload: int = 0) -> None:
        text = torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8).to(self._device)
        self._broadcast(torch.tensor([len(text), payload], dtype=torch.int64, device=self._device))
        self._broadcast(text)

    # -- receiving --------------------------------------------------------------------------------------------------

    def _buckets(self) -> Iterator[Bucket]:
        while True:
            sizes = self._broadcast(torch.empty(2, dtype=torch.int64, device=self._device))
            length, payload = map(int, sizes.tolist())
            text = self._broadcast(torch.empty(length, dtype=torch.uint8, device=self._device))
            header = json.loads(text.cpu().numpy().tobytes())
            if "error" in header:
                raise WeightStreamError(f"the sending side failed: {header['error']}")
            if "end" in header:
                return
            buffer = self._room(payload)
            if payload:
                self._broadcast(buffer)
            with ExitStack() as loan:
                yield headers.bucket(header, headers.parts(header, buffer), loan)

    def _broadcast(self, tensor: Tensor) -> Tensor:
        try:
            self._group.broadcast(tensor, 0).wait()
        except RuntimeError as error:
            raise RunError(f"a process of the meeting is gone, or late: {error}", where=self._where) from error
        return tensor

    def _room(self, size: int) -> Tensor:
        if len(self._buffer) < size:
            self._buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
        return self._buffer[:size]


class GlooBroadcast(Broadcast):
    """Through host memory."""

    name = "gloo"

    def _find_device(self, meeting: Meeting) -> torch.device:
        return torch.device("cpu")

    def _join(self, meeting: Meeting) -> Any:
        timeout = timedelta(seconds=meeting.timeout_s)
        return dist.ProcessGroupGloo(meeting.store, meeting.rank, meeting.size, timeout)


class NCCLBroadcast(Broadcast):
    """Between devices, each process having one of its own."""

    name = "nccl"

    def _find_device(self, meeting: Meeting) -> torch.device:
        return meeting.hardware.device()

    def _join(self, meeting: Meeting) -> Any:
        if not dist.is_nccl_available():
            raise RunError("this torch has no NCCL", where=self._where, mend="choose gloo")
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=meeting.timeout_s)
        return dist.ProcessGroupNCCL(meeting.store, meeting.rank, meeting.size, options)
