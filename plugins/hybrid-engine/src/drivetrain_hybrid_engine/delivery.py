"""The checks of one delivery of weights: what leaves is written down, what arrives is held against it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from drivetrain import WeightStreamError
from drivetrain.weights import Bucket, Manifest, WeightEntry, WeightStream, fingerprint

Description = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Whole shape and dtype of each weight, by name."""


class Departure:
    """A stream on its way out.

    Attributes:
        described: what has left.
        bytes, buckets: how much that was; aliases carry nothing.
        broken: drawing from the stream has failed.
    """

    def __init__(self, stream: WeightStream, *, fingerprints: bool) -> None:
        """Take a stream over.

        Args:
            fingerprints: take one of each weight, which reads all of it on the host.
        """
        self.described: Description = {}
        self.bytes = self.buckets = 0
        self.broken = False
        self._stream = stream
        self._fingerprints = fingerprints
        self.stream = WeightStream(self._pass_on())

    def drain(self) -> None:
        """Draw what is left, so that no other rank waits for this one in a call that gathers shards."""
        if not self.broken:
            for _ in self._stream:
                pass

    def _pass_on(self) -> Iterator[Bucket]:
        going = iter(self._stream)
        while True:
            self.broken = True
            bucket = next(going, None)
            self.broken = False
            if bucket is None:
                return
            self.buckets += 1
            self.bytes += sum(entry.nbytes for entry in bucket.entries)
            self.described |= {entry.name: (entry.shape, entry.dtype) for entry in bucket.entries}
            yield replace(bucket, entries=tuple(map(self._stamp, bucket.entries))) if self._fingerprints else bucket

    @staticmethod
    def _stamp(entry: WeightEntry) -> WeightEntry:
        return entry if entry.alias else replace(entry, fingerprint=fingerprint(entry.tensor))


class Arrival:
    """A stream on its way in. The receiver that iterates it sees the error where something is wrong.

    Attributes:
        complete: everything has come.
    """

    def __init__(self, stream: WeightStream, expected: Description, *, fingerprints: bool) -> None:
        """Take a stream over.

        Args:
            expected: what has to come; it may grow while the stream is drawn from.
            fingerprints: compare that of each weight with the one that it left with.
        """
        self.complete = False
        self._stream = stream
        self._manifest = Manifest(expected)
        self._fingerprints = fingerprints
        self.stream = WeightStream(self._pass_on())

    def _pass_on(self) -> Iterator[Bucket]:
        for bucket in self._stream:
            for entry in bucket.entries:
                self._check(entry)
            yield bucket
        self._manifest.complete()
        self.complete = True

    def _check(self, entry: WeightEntry) -> None:
        """Raise ``WeightStreamError`` for an entry that is not as it was described, or whose content has changed."""
        self._manifest.accept(entry)
        _, dtype = self._manifest.expected[entry.name]
        if entry.dtype != dtype:
            raise WeightStreamError(f"weight {entry.name!r} was sent as {entry.dtype}; expected {dtype}")
        if entry.alias:
            return
        tensor = entry.tensor
        if tensor.dtype != dtype or (entry.placement.count == 1 and tensor.shape != entry.shape):
            raise WeightStreamError(f"weight {entry.name!r} is said to be {entry.dtype} of shape {entry.shape}; the "
                                    f"tensor that came is {tensor.dtype} of shape {tuple(tensor.shape)}")  # fmt: skip
        if self._fingerprints and fingerprint(tensor) != entry.fingerprint:
            raise WeightStreamError(f"weight {entry.name!r} did not arrive as it left: the fingerprints differ")
