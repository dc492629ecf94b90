"""The checks of one delivery of weights: what leaves is written down, what arrives is held against it."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from drivetrain import WeightStreamError
from drivetrain.weights import Bucket, Manifest, WeightEntry, WeightStream, fingerprints

if TYPE_CHECKING:
    from drivetrain import TrainingBackend
    from drivetrain_hybrid_engine.config import SendingConfig

Description = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Whole shape and dtype of each weight, by name."""

SAMPLE = 16
"""A sample of names is about one in so many."""

NAMED = 5
"""An error names so many weights at most."""

Chosen = Callable[[str], bool]
"""Whether the content of the weight of that name is compared."""


def sample(number: int) -> Chosen:
    """One in :data:`SAMPLE` names; samples of as many consecutive numbers have every name once between them."""
    return lambda name: (zlib.crc32(name.encode()) + number) % SAMPLE == 0


def compared(wish: str, synced: int) -> Chosen | bool:
    """The weights whose contents are compared in a sync after ``synced`` in a row that did not fail.

    Args:
        wish: the setting ``fingerprint``.
    """
    if wish == "sampled" and synced:
        return sample(synced)
    return wish in ("sampled", "always") or (wish == "first" and not synced)


def lent(backend: TrainingBackend, config: SendingConfig) -> AbstractContextManager[WeightStream]:
    """What a backend lends of its weights, by the settings: all of them, or its adapter."""
    lend = backend.adapter if config.lora == "adapter" else backend.weights
    return lend(bucket_bytes=config.bucket_bytes)


class Departure:
    """A stream on its way out.

    Attributes:
        described: what has left.
        bytes, buckets: how much that was; aliases carry nothing.
        broken: drawing from the stream has failed.
    """

    def __init__(self, stream: WeightStream, *, fingerprints: Chosen | bool) -> None:
        """Take a stream over.

        Args:
            fingerprints: the weights that get one, or whether all do.
        """
        self.described: Description = {}
        self.bytes = self.buckets = 0
        self.broken = False
        self._stream = stream
        self._chosen = _chosen(fingerprints)
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
            yield replace(bucket, entries=tuple(self._stamped(bucket.entries)))

    def _stamped(self, entries: Sequence[WeightEntry]) -> list[WeightEntry]:
        stamped = [not entry.alias and self._chosen(entry.name) for entry in entries]
        taken = iter(fingerprints([entry.tensor for entry, one in zip(entries, stamped) if one]))
        return [replace(entry, fingerprint=next(taken)) if one else entry for entry, one in zip(entries, stamped)]


class Arrival:
    """A stream on its way in. The receiver that iterates it sees the error where something is wrong."""

    def __init__(self, stream: WeightStream, expected: Description, *, fingerprints: Chosen | bool) -> None:
        """Take a stream over.

        Args:
            expected: what has to come; it may grow while the stream is drawn from.
            fingerprints: the weights of which it is compared with the one that they left with, or whether all are.
        """
        self._ended: list[bool] = []
        # which does not refer to this object: a receiver that lets it go has let the stream go, at once
        self.stream = WeightStream(_checked(stream, Manifest(expected), _chosen(fingerprints), self._ended))

    @property
    def complete(self) -> bool:
        """Whether everything has come."""
        return bool(self._ended)


def _checked(stream: WeightStream, manifest: Manifest, chosen: Chosen, ended: list[bool]) -> Iterator[Bucket]:
    for bucket in stream:
        for entry in bucket.entries:
            _check(entry, manifest)
        _compare([entry for entry in bucket.entries if not entry.alias and chosen(entry.name)])
        yield bucket
    manifest.complete()
    ended.append(True)


def _check(entry: WeightEntry, manifest: Manifest) -> None:
    """Raise ``WeightStreamError`` for an entry that is not as it was described."""
    manifest.accept(entry)
    _, dtype = manifest.expected[entry.name]
    if entry.dtype != dtype:
        raise WeightStreamError(f"weight {entry.name!r} was sent as {entry.dtype}; expected {dtype}")
    if entry.alias:
        return
    tensor = entry.tensor
    if tensor.dtype != dtype or (entry.placement.count == 1 and tensor.shape != entry.shape):
        raise WeightStreamError(f"weight {entry.name!r} is said to be {entry.dtype} of shape {entry.shape}; the "
                                f"tensor that came is {tensor.dtype} of shape {tuple(tensor.shape)}")  # fmt: skip


def _compare(entries: Sequence[WeightEntry]) -> None:
    """Raise ``WeightStreamError`` where contents have changed."""
    found = fingerprints([entry.tensor for entry in entries])
    if wrong := [repr(entry.name) for entry, own in zip(entries, found) if own != entry.fingerprint]:
        if len(wrong) == 1:
            raise WeightStreamError(f"weight {wrong[0]} did not arrive as it left: the fingerprints differ")
        more = f" and {len(wrong) - NAMED} more" if len(wrong) > NAMED else ""
        raise WeightStreamError(f"weights {', '.join(wrong[:NAMED])}{more} did not arrive as they left: the "
                                "fingerprints differ")  # fmt: skip


def _chosen(which: Chosen | bool) -> Chosen:
    return which if callable(which) else lambda name: which
