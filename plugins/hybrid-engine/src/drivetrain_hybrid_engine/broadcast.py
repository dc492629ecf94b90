"""The transports ``gloo`` and ``nccl``: one process broadcasts, the others of its group receive.

A bucket is three broadcasts: two numbers (bytes of the header and of the payload), the header (JSON: names, dtypes,
shapes, aliases, fingerprints), and all tensors one after the other in a buffer that is used again for every bucket. A
last header says that it is the end, or why it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain import RunError, WeightStreamError
from drivetrain.weights import Bucket, WeightStream
from drivetrain_hybrid_engine import headers

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Broadcast:
    """Buckets from one process to all others of a group; every process calls :meth:`send` or :meth:`receive`."""

    device_type: ClassVar[str]

    def __init__(self, group: ProcessGroup | None = None, source: int = 0) -> None:
        """Join a group.

        Args:
            group: of torch.distributed, which has a backend for :attr:`device_type`; None: all processes.
            source: rank in the group of the process that sends.
        """
        if not (dist.is_available() and dist.is_initialized()):
            raise RunError("torch.distributed is not initialised", where=f"weight transport {type(self).__name__}")
        self._group = group
        self._source = source
        self._device = torch.device(self.device_type)
        self._buffer = torch.empty(0, dtype=torch.uint8, device=self._device)

    def send(self, stream: WeightStream) -> None:
        """Broadcast every bucket. An error in drawing one is told to the receivers, and raised."""
        self._must_be(sender=True)
        try:
            for bucket in stream:
                self._send_bucket(bucket)
        except Exception as error:
            self._send_header({"error": f"{type(error).__name__}: {error}"})
            raise
        self._send_header({"end": True})

    def receive(self) -> WeightStream:
        """The buckets, in the order sent. The tensors of a bucket expire when the next one is drawn.

        A receiver that stops in the middle has to draw the rest, or the others of the group wait for it.

        Raises:
            WeightStreamError: when drawn from, if the sender failed.
        """
        self._must_be(sender=False)
        return WeightStream(self._buckets())

    def _must_be(self, *, sender: bool) -> None:
        rank = dist.get_rank(self._group)
        if (rank == self._source) != sender:
            raise RunError(f"rank {self._source} of the group sends and the others receive; this is rank {rank}",
                           where=f"weight transport {type(self).__name__}")  # fmt: skip

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
        dist.broadcast(tensor, group=self._group, group_src=self._source)
        return tensor

    def _room(self, size: int) -> Tensor:
        if len(self._buffer) < size:
            self._buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
        return self._buffer[:size]


class GlooBroadcast(Broadcast):
    """Through host memory."""

    device_type = "cpu"


class NCCLBroadcast(Broadcast):
    """Between the devices that are current in each process."""

    device_type = "cuda"
