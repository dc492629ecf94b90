"""A bucket as JSON, and its tensors one after the other in a buffer: what the ends of a transport tell each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from drivetrain.weights import Bucket, Placement, WeightEntry, lend

ALIGNMENT = 16
"""Bytes; a tensor of the buffer starts at a multiple, so that it can be seen as its dtype."""


def describe(bucket: Bucket) -> dict[str, Any]:
    """All of a bucket but its tensors, as JSON can hold it."""
    return {"version": bucket.version, "kind": bucket.kind, "entries": list(map(_entry, bucket.entries))}


def room(bucket: Bucket) -> int:
    """Bytes that a buffer for the tensors has to have."""
    return _layout([entry.nbytes for entry in bucket.entries])[1]


def fill(buffer: Tensor, bucket: Bucket) -> None:
    """Copy the tensors into a buffer (bytes,) of at least :func:`room`, one after the other."""
    places, _ = _layout([entry.nbytes for entry in bucket.entries])
    for entry, place in zip(bucket.entries, places):
        if entry.nbytes:
            _view(buffer, place, entry.nbytes, entry.dtype).copy_(entry.tensor.detach().reshape(-1))


def parts(header: dict[str, Any], buffer: Tensor) -> list[Tensor]:
    """The tensors that were filled in, as views of the buffer; for an alias, an empty one."""
    sizes = [one["bytes"] for one in header["entries"]]
    places, _ = _layout(sizes)
    return [
        _view(buffer, place, size, getattr(torch, one["dtype"])).view([0] if one["alias"] else one["held"])
        for one, place, size in zip(header["entries"], places, sizes)
    ]


def bucket(header: dict[str, Any], tensors: Sequence[Tensor], loan: ExitStack) -> Bucket:
    """The bucket that a header describes, with these tensors, one of each entry; they are lent until ``loan`` ends."""
    described = header["entries"]

    def named() -> Iterator[tuple[str, Tensor, str | None]]:
        for one, tensor in zip(described, tensors):
            if one["alias"]:
                dtype = getattr(torch, one["dtype"])
                yield one["name"], torch.empty(one["shape"], dtype=dtype, device="meta"), one["alias"]
            else:
                yield one["name"], tensor, None

    everything = sum(one["bytes"] for one in described)
    (lent,) = loan.enter_context(lend(named(), bucket_bytes=everything, version=header["version"]))
    entries = []
    for one, entry in zip(described, lent.entries):
        dim, index, count = one["placement"]
        placement = Placement(dim=dim, index=index, count=count)
        entries.append(replace(entry, shape=tuple(one["shape"]), placement=placement, fingerprint=one["fingerprint"]))
    return replace(lent, kind=header["kind"], entries=tuple(entries))


def _entry(entry: WeightEntry) -> dict[str, Any]:
    place = entry.placement
    return {
        "name": entry.name, "dtype": str(entry.dtype).removeprefix("torch."), "shape": list(entry.shape),
        "held": None if entry.alias else list(entry.tensor.shape), "bytes": entry.nbytes, "alias": entry.alias,
        "fingerprint": entry.fingerprint, "placement": [place.dim, place.index, place.count],
    }  # fmt: skip


def _layout(sizes: list[int]) -> tuple[list[int], int]:
    """Where tensors of these bytes start in the buffer, and how long it has to be."""
    places, end = [], 0
    for size in sizes:
        places.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return places, end


def _view(buffer: Tensor, place: int, size: int, dtype: torch.dtype) -> Tensor:
    return buffer[place : place + size].view(dtype)
