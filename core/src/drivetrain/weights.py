"""Weights on their way out of a backend: buckets of tensors on loan, and the checks of the receiving side."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch

from drivetrain.errors import ExpiredWeightsError, WeightStreamError


class _Lease:
    """Whether the context that lends some tensors is still open."""

    def __init__(self) -> None:
        self.open = True


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Which part of the whole tensor a bucket entry holds.

    Attributes:
        dim: the dimension that is split, or None for the whole tensor.
        index, count: which of how many shares, as ``torch.chunk`` cuts them: equal but for the last ones, which may be
            shorter, or empty.
    """

    dim: int | None = None
    index: int = 0
    count: int = 1


@dataclass(frozen=True, kw_only=True)
class WeightEntry:
    """One tensor (or a shard of one) on loan.

    Attributes:
        name: the Hugging Face name.
        shape: of the whole tensor.
        dtype: of the tensor as sent.
        alias: the name of the tensor that this one is tied to; such an entry carries no tensor.
        fingerprint: of the tensor where it left, for the receiver to compare; None where nobody took it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    placement: Placement = Placement()
    alias: str | None = None
    fingerprint: str | None = None
    _tensor: torch.Tensor | None = None
    _lease: _Lease = field(default_factory=_Lease)

    @classmethod
    def whole(cls, name: str, tensor: torch.Tensor, alias: str | None = None) -> WeightEntry:
        """An entry for a whole tensor, or for another name of one."""
        carried = None if alias else tensor
        return cls(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype, alias=alias, _tensor=carried)

    @classmethod
    def share(cls, name: str, tensor: torch.Tensor, shape: Iterable[int], placement: Placement) -> WeightEntry:
        """An entry for one share of a tensor of that shape."""
        return cls(name=name, shape=tuple(shape), dtype=tensor.dtype, placement=placement, _tensor=tensor)

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor, while the context that lends it is open.

        Raises:
            ExpiredWeightsError: when that context has been left.
            WeightStreamError: for an alias, which has no tensor.
        """
        if not self._lease.open:
            raise ExpiredWeightsError(self.name)
        if self._tensor is None:
            raise WeightStreamError(f"weight {self.name!r} is an alias of {self.alias!r} and carries no tensor")
        return self._tensor

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor that the entry carries; 0 for an alias."""
        return 0 if self._tensor is None else self._tensor.numel() * self._tensor.element_size()

    @property
    def room(self) -> int:
        """Bytes of the largest share, and so the same on all ranks; 0 for an alias."""
        part = self.placement
        if self._tensor is None or part.dim is None or not self.shape[part.dim]:
            return self.nbytes
        rows = self.shape[part.dim]
        return math.prod(self.shape) // rows * -(-rows // part.count) * self._tensor.element_size()


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Some entries that travel together.

    Attributes:
        version: of the weights.
        kind: ``full`` weights of the model, or an ``adapter``.
    """

    entries: tuple[WeightEntry, ...]
    version: int = 0
    kind: str = "full"


class WeightStream:
    """The sequence of buckets that a backend lends inside one context; it can be iterated once.

    A stream that is made without a lease passes on what another one lends.
    """

    def __init__(self, buckets: Iterable[Bucket], lease: _Lease | None = None) -> None:
        self._buckets = iter(buckets)
        self._lease = lease or _Lease()

    def __iter__(self) -> Iterator[Bucket]:
        while True:
            if not self._lease.open:  # before the next bucket is drawn, which may gather shards from other ranks
                raise ExpiredWeightsError("*")
            bucket = next(self._buckets, None)
            if bucket is None:
                return
            yield bucket


@contextmanager
def lend(
    tensors: Iterable[tuple[str, torch.Tensor, str | None] | WeightEntry],
    *,
    bucket_bytes: int,
    version: int = 0,
    kind: str = "full",
) -> Iterator[WeightStream]:
    """Lend tensors as a stream of buckets of at most ``bucket_bytes``.

    Args:
        tensors: ``(name, whole tensor, alias)``, or an entry that says itself what it is; one with an alias is sent
            without its tensor. A generator is drawn from bucket by bucket, so that it may gather shards as it goes.
        bucket_bytes: bound of a bucket; a larger tensor travels alone.
        kind: of the buckets.
    """
    lease = _Lease()

    def buckets() -> Iterator[Bucket]:
        pending: list[WeightEntry] = []
        size = 0
        for given in tensors:
            entry = replace(given if isinstance(given, WeightEntry) else WeightEntry.whole(*given), _lease=lease)
            if pending and size + entry.room > bucket_bytes:
                yield Bucket(entries=tuple(pending), version=version, kind=kind)
                pending, size = [], 0
            pending.append(entry)
            size += entry.room
        if pending:
            yield Bucket(entries=tuple(pending), version=version, kind=kind)

    try:
        yield WeightStream(buckets(), lease)
    finally:
        lease.open = False


class Manifest:
    """What a receiver expects: each name once, with its shape and dtype."""

    def __init__(self, expected: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        self.expected = expected
        self._seen: set[str] = set()

    def accept(self, entry: WeightEntry) -> None:
        """Count an entry in.

        Raises:
            WeightStreamError: for an unknown name, a second one, another shape, or integers in place of floats.
        """
        if entry.name not in self.expected:
            raise WeightStreamError(f"weight {entry.name!r} was sent, but the receiving model has no such weight")
        if entry.name in self._seen:
            raise WeightStreamError(f"weight {entry.name!r} was sent twice")
        shape, dtype = self.expected[entry.name]
        if entry.shape != shape:
            raise WeightStreamError(f"weight {entry.name!r} was sent with shape {entry.shape}; expected {shape}")
        if entry.dtype.is_floating_point != dtype.is_floating_point:
            raise WeightStreamError(f"weight {entry.name!r} was sent as {entry.dtype}; expected {dtype}")
        self._seen.add(entry.name)

    def complete(self) -> None:
        """Check that every expected name came.

        Raises:
            WeightStreamError: naming what is missing.
        """
        missing = sorted(set(self.expected) - self._seen)
        if missing:
            raise WeightStreamError(f"{len(missing)} weights were not sent, first {missing[0]!r}")


ROW = 2**16  # words of 4 bytes that a tensor's bytes are cut into


def fingerprint(tensor: torch.Tensor) -> str:
    """A checksum of a tensor's dtype, shape and bytes: equal content has an equal fingerprint on every device.

    It finds errors and is no defence against an attack. See :func:`fingerprints`.
    """
    return fingerprints([tensor])[0]


def fingerprints(tensors: Sequence[torch.Tensor]) -> list[str]:
    """The :func:`fingerprint` of each tensor; they are computed on the tensors' device and leave it together.

    Bytes are words x of 32 bits in rows of ``ROW``, the last one filled up with zeros. With pseudorandom odd numbers of
    64 bits v, of a row, and w, of a place in it, the sum of ``v[r] w[j] x[r, j]`` is taken modulo 2^64, in which the
    order of additions does not matter. A change of one word always shows, others but for about one in 2^32.
    """
    sums = [_checksum(tensor.detach(), _first_odd(tensor.device)) for tensor in tensors]
    numbers = torch.stack([one.to(sums[0].device) for one in sums]).tolist() if sums else []
    told = (f"{tensor.dtype}{tuple(tensor.shape)}{number}" for tensor, number in zip(tensors, numbers))
    return [hashlib.blake2b(text.encode(), digest_size=16).hexdigest() for text in told]


def _checksum(tensor: torch.Tensor, odd: torch.Tensor) -> torch.Tensor:
    octets = tensor.contiguous().view(-1).view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    step = 4 * ROW * (4 if tensor.device.type == "cpu" else 64)  # what a host's cache holds, what fills a device
    for start in range(0, len(octets), step):
        part = octets[start : start + step]
        if len(part) % 4 or part.storage_offset() % 4:
            part = torch.nn.functional.pad(part, (0, -len(part) % 4)).clone()
        words, row = part.view(torch.int32), ROW + start // (4 * ROW)
        whole, rest = divmod(len(words), ROW)
        end = row + whole + 1
        rows = odd[row:end] if end <= len(odd) else _odd(row, whole + 1, tensor.device)
        if whole:
            total += ((words[: whole * ROW].view(whole, ROW) * odd[:ROW]).sum(dim=1) * rows[:whole]).sum()
        if rest:
            total += (words[whole * ROW :] * odd[:rest]).sum() * rows[whole]
    return total


@lru_cache
def _first_odd(device: torch.device) -> torch.Tensor:
    """The numbers of places in a row and of the first rows, kept: 1 MiB of each device."""
    return _odd(0, 2 * ROW, device)


def _odd(first: int, count: int, device: torch.device) -> torch.Tensor:
    """Numbers of a sequence of odd ones, int64 (count,), mixed as splitmix64 does (Steele, Lea, Flood 2014)."""
    mixed = torch.arange(first + 1, first + count + 1, device=device) * -0x61C8864680B583EB
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        mixed = (mixed ^ (mixed >> shift & (1 << 64 - shift) - 1)) * factor
    return (mixed ^ (mixed >> 31 & (1 << 33) - 1)) | 1
