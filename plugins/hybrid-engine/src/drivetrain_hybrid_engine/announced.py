"""Buckets that lie where all processes of a meeting reach them: the store says where, and who is done with them."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from datetime import timedelta
from itertools import count
from typing import Any

from torch import Tensor
from torch.distributed import DistNetworkError

from drivetrain import Meeting, RunError, WeightStreamError
from drivetrain.weights import Bucket, WeightStream
from drivetrain_hybrid_engine import headers

AHEAD = 2
"""Buckets that are there at once: one is filled while the other is taken in."""

DONE, STOPPED = b"done", b"stopped"


class Announced(ABC):
    """Rank 0 of a meeting puts each bucket somewhere and announces it; the others acknowledge it when it has expired.

    Keys of the store are ``STREAM/BUCKET``, whose value is a header (JSON), and ``STREAM/BUCKET/RANK``, by which a
    receiver says that it is done. An announcement that all are done with is deleted.
    """

    name: str

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._streams = 0
        # announcements that somebody may not be done with, and their places
        self._open: deque[tuple[str, int | None]] = deque()
        self._listening: set[int] = set()  # ranks that have not stopped

    def send(self, stream: WeightStream) -> None:
        """Pass every bucket to all receivers; on return they are done with them.

        An error in drawing one is told to the receivers, and raised.

        Raises:
            RunError: a receiver stopped before the end, or was not done with a bucket in ``timeout_s``.
        """
        self._must_be(sender=True)
        receivers = set(range(1, self._meeting.size))
        self._listening = set(receivers)
        self._open.clear()
        self._streams += 1
        number = 0
        try:
            for bucket in stream:
                if len(self._open) == AHEAD:
                    self._collect()
                place = number % AHEAD
                self._announce(number, {**headers.describe(bucket), "at": self.put(place, bucket)}, place)
                number += 1
            self._announce(number, {"end": True})
        except Exception as error:
            self._announce(number, {"error": f"{type(error).__name__}: {error}"})
            raise
        finally:
            try:
                while self._open:
                    self._collect()
            finally:
                self.end()
        if gone := receivers - self._listening:
            raise RunError(f"{_ranks(gone)} stopped before it had all weights", where=self._where)

    def receive(self) -> WeightStream:
        """The buckets, in the order sent. The tensors of a bucket expire when the next one is drawn.

        A receiver that stops in the middle draws the rest or lets the stream go, or the sender waits for it.

        Raises:
            WeightStreamError: when drawn from, if the sender failed.
            RunError: when drawn from, if nothing came in ``timeout_s``.
        """
        self._must_be(sender=False)
        self._streams += 1
        return WeightStream(self._buckets(self._streams))

    @abstractmethod
    def put(self, place: int, bucket: Bucket) -> Any:
        """Put a bucket in a place, of :data:`AHEAD`, whose last one nobody uses; returns what JSON can hold."""

    @abstractmethod
    def take(self, place: int, header: dict[str, Any]) -> Sequence[Tensor]:
        """The tensors of a bucket, one of each entry; ``header["at"]`` is what :meth:`put` returned."""

    def taken(self, place: int) -> None:
        """All receivers are done with what was put in a place."""

    def end(self) -> None:
        """All receivers are done with the stream."""

    # -- sending ----------------------------------------------------------------------------------------------------

    def _announce(self, number: int, header: dict[str, Any], place: int | None = None) -> None:
        self._meeting.hardware.synchronize()  # the bucket is written
        key = f"{self._streams}/{number}"
        self._open.append((key, place))
        self._meeting.store.set(key, json.dumps(header))

    def _collect(self) -> None:
        """Wait until those that listen are done with the oldest announcement, and note who stopped."""
        store, limit = self._meeting.store, self._meeting.timeout_s
        key, place = self._open.popleft()
        keys = {rank: f"{key}/{rank}" for rank in self._listening}
        try:
            if keys:
                store.wait([*keys.values()], timedelta(seconds=limit))
        except DistNetworkError:
            raise
        except RuntimeError as error:
            late = {rank for rank, own in keys.items() if not store.check([own])}
            self._listening -= late
            raise RunError(f"{_ranks(late)} was not done with a bucket in {limit:g} s", where=self._where) from error
        for rank, own in keys.items():
            if store.get(own) == STOPPED:
                self._listening.discard(rank)
            store.delete_key(own)
        store.delete_key(key)
        if place is not None:
            self.taken(place)

    # -- receiving --------------------------------------------------------------------------------------------------

    def _buckets(self, stream: int) -> Iterator[Bucket]:
        ended = False
        try:
            for number in count():
                key = f"{stream}/{number}"
                header = json.loads(self._heard(key))
                ended = "at" not in header
                if "error" in header:
                    raise WeightStreamError(f"the sending side failed: {header['error']}")
                if ended:
                    return
                with ExitStack() as loan:
                    yield headers.bucket(header, self.take(number % AHEAD, header), loan)
                self._acknowledge(key, DONE)
        finally:
            self._acknowledge(key, DONE if ended else STOPPED)

    def _heard(self, key: str) -> bytes:
        store, limit = self._meeting.store, self._meeting.timeout_s
        try:
            store.wait([key], timedelta(seconds=limit))
        except DistNetworkError:
            raise
        except RuntimeError as error:
            raise RunError(f"rank 0 has sent nothing for {limit:g} s", where=self._where) from error
        return store.get(key)

    def _acknowledge(self, key: str, word: bytes) -> None:
        self._meeting.hardware.synchronize()  # copies out of the bucket are made
        self._meeting.store.set(f"{key}/{self._meeting.rank}", word.decode())

    # -- both -------------------------------------------------------------------------------------------------------

    def _must_be(self, *, sender: bool) -> None:
        if (self._meeting.rank == 0) != sender:
            raise RunError(f"rank 0 of the meeting sends and the others receive; this is rank {self._meeting.rank}",
                           where=self._where)  # fmt: skip

    @property
    def _where(self) -> str:
        return f"weight transport {self.name}"


def _ranks(ranks: Iterable[int]) -> str:
    return f"rank {', '.join(map(str, sorted(ranks)))}"
