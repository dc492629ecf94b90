"""What the processes of test_hybrid_meetings do: rank 0 sends to the others, by each transport that has a meeting."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore

from drivetrain import ExpiredWeightsError, Meeting, PluginConfig, RunError, WeightStreamError, WeightTransport, resolve
from drivetrain.weights import Bucket, Placement, WeightEntry, WeightStream, lend
from drivetrain_hybrid_engine.delivery import Arrival, Departure

TRANSPORTS = ("ipc", "folder")
SIZE = 3

TENSORS = {
    "halves": torch.arange(7).bfloat16() / 3, "flags": torch.tensor([True, False, True]), "number": torch.tensor(2.5),
    "nothing": torch.zeros(0, 3), "ids": torch.arange(5), "large": torch.arange(4000.0).reshape(40, 100),
    "turned": torch.arange(12.0).reshape(3, 4).t(), "eighth": torch.arange(9.0).to(torch.float8_e4m3fn),
    "inside": torch.arange(40.0)[3:17],
}  # fmt: skip
DESCRIBED = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in TENSORS.items()}
DESCRIBED |= {"tied": DESCRIBED["large"], "part": ((9, 2), torch.float32)}


def lent(device: str = "cpu", factor: int = 1, fails: bool = False) -> Iterator[Any]:
    """Tensors of many kinds, a tied one and a share; the floats are multiplied by the factor."""
    for name, tensor in TENSORS.items():
        scaled = tensor * factor if tensor.dtype in (torch.float32, torch.bfloat16) else tensor
        yield name, scaled.to(device), None
        if name == "large":
            if fails:
                raise RunError("the trainer ran out of luck")
            yield "tied", tensor, "large"
    share = torch.full((3, 2), float(factor), device=device)
    yield WeightEntry.share("part", share, (9, 2), Placement(dim=0, index=1, count=3))


def meeting(store: Any, rank: int, hardware: str = "cpu", size: int = SIZE, timeout_s: float = 60.0) -> Meeting:
    made = resolve("hardware", hardware)(PluginConfig(name=hardware))
    return Meeting(store=store, rank=rank, size=size, hardware=made, timeout_s=timeout_s)


def work(rank: int, port: int, folder: Path, hardware: str = "cpu", transports: tuple[str, ...] = TRANSPORTS) -> None:
    """Rank 0 sends; others write what they saw to ``folder/TRANSPORT-RANK.pt``."""
    torch.set_num_threads(1)
    os.environ["WEIGHT_TRANSPORT_FOLDER"] = str(folder) if rank == 0 else "/nowhere"
    store = TCPStore("localhost", port, is_master=False)
    for name in transports:
        transport = resolve("weight_transports", name)(meeting(PrefixStore(name, store), rank, hardware))
        if rank == 0:
            torch.save(send(transport, hardware), folder / f"{name}-0.pt")
        else:
            torch.save(receive(transport, rank), folder / f"{name}-{rank}.pt")


def send(transport: WeightTransport, device: str) -> list[str]:
    """Streams of several bucket sizes, one that fails, one that a receiver stops; returns the errors."""
    errors = []
    for factor, bucket_bytes, fails in ((1, 100, False), (2, 2**20, False), (3, 100, True), (4, 100, False),
                                        (5, 1000, False)):  # fmt: skip
        try:
            with lend(lent(device, factor, fails), bucket_bytes=bucket_bytes, version=factor) as stream:
                transport.send(Departure(stream, fingerprints=True).stream)
        except RunError as error:
            errors.append(str(error))
    return errors


def receive(transport: WeightTransport, rank: int) -> dict[str, Any]:
    """Take all streams in; rank 1 stops in the fourth."""
    seen: dict[str, Any] = {"buckets": [], "errors": []}
    for factor in range(1, 6):
        try:
            seen[factor] = taken(transport, factor, seen["buckets"], most=3 if (rank, factor) == (1, 4) else 99)
        except WeightStreamError as error:
            seen["errors"].append(str(error))
    return seen


def expiring(stream: WeightStream) -> Iterator[Bucket]:
    """The buckets of a stream; the tensors of each have expired when the next one is there."""
    kept: list[WeightEntry] = []
    for bucket in stream:
        for entry in kept:
            try:
                _ = entry.tensor
                raise AssertionError("a tensor outlived its bucket")
            except ExpiredWeightsError:
                pass
        kept = [entry for entry in bucket.entries if not entry.alias]
        yield bucket


def taken(transport: WeightTransport, version: int, buckets: list[int], *, most: int) -> dict[str, Tensor]:
    """Copies of what comes, checked; at most so many buckets."""
    found = {}
    stream: WeightStream = Arrival(transport.receive(), DESCRIBED, fingerprints=True).stream
    for number, bucket in enumerate(expiring(stream), start=1):
        assert bucket.version == version and bucket.kind == "full"
        for entry in bucket.entries:
            assert (entry.shape, entry.dtype) == DESCRIBED[entry.name]
            assert entry.alias == ("large" if entry.name == "tied" else None)
            assert entry.placement == (Placement(dim=0, index=1, count=3) if entry.name == "part" else Placement())
            found[entry.name] = torch.empty(0) if entry.alias else entry.tensor.to("cpu", copy=True)
        if number == most:
            break
    buckets.append(number)
    return found
