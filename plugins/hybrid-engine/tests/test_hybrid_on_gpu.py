"""Weights between processes that share a GPU, and checksums that it computes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import hybrid_meetings as meetings
import pytest
import test_hybrid_meetings as checks
import torch
import torch.multiprocessing as multiprocessing
from torch.distributed import TCPStore

from drivetrain import Meeting, PluginConfig, resolve
from drivetrain.weights import fingerprints, lend

pytestmark = [
    pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="handles of CUDA or ROCm are shared")
]  # fmt: skip
HARDWARE = "rocm" if torch.version.hip else "cuda"
COUNT, EACH = 24, 2**26  # tensors of 128 MiB in bfloat16


def test_a_checksum_is_the_same_on_host_and_device() -> None:
    tensors = [tensor for tensor in meetings.TENSORS.values()]
    tensors += [torch.randn(2**20 + 7), torch.randn(3, 2**21 + 1).bfloat16()]
    assert fingerprints([tensor.cuda() for tensor in tensors]) == fingerprints(tensors)


def test_processes_of_one_gpu_see_the_senders_buffers(tmp_path: Path) -> None:
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    multiprocessing.spawn(meetings.work, (store.port, tmp_path, HARDWARE), nprocs=meetings.SIZE)
    for transport in meetings.TRANSPORTS:
        checks.check(tmp_path, transport)


def test_nothing_goes_through_the_host(tmp_path: Path) -> None:
    """A receiver's views are on the device, and neither end takes more of it than two buffers."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    multiprocessing.spawn(_large, (store.port, tmp_path), nprocs=2)
    for rank in range(2):
        seen = torch.load(tmp_path / f"large-{rank}.pt")
        print(f"rank {rank}: {seen}")
        assert seen["extra_bytes"] <= (2.1 if rank == 0 else 0.1) * 2 * EACH * 2
    print(torch.load(tmp_path / "checksum.pt"))


def _large(rank: int, port: int, folder: Path) -> None:
    """Send 3 GiB twice in buckets of 256 MiB."""
    hardware: Any = resolve("hardware", HARDWARE)(PluginConfig(name=HARDWARE))
    hardware.select(0)
    met = Meeting(store=TCPStore("localhost", port, is_master=False), rank=rank, size=2, hardware=hardware)
    transport = resolve("weight_transports", "ipc")(met)
    held = [torch.full((EACH,), number, dtype=torch.bfloat16, device="cuda") for number in range(COUNT)]
    into = [torch.zeros_like(tensor) for tensor in held] if rank else []
    before, seconds = hardware.memory().allocated, []
    for _ in range(2):
        hardware.reset_peak()
        hardware.synchronize()
        start = time.perf_counter()
        if rank == 0:
            with lend(((str(n), t, None) for n, t in enumerate(held)), bucket_bytes=4 * EACH) as stream:
                transport.send(stream)
        else:
            for bucket in transport.receive():
                for entry in bucket.entries:
                    assert entry.tensor.is_cuda
                    into[int(entry.name)].copy_(entry.tensor)
        hardware.synchronize()
        seconds.append(time.perf_counter() - start)
    peak = hardware.memory().peak - before
    assert all(own.equal(other) for own, other in zip(into, held))
    told = {"extra_bytes": peak, "seconds": seconds, "gb_per_s": COUNT * EACH * 2 / seconds[-1] / 1e9}
    torch.save(told, folder / f"large-{rank}.pt")
    if rank == 0:
        for _ in range(2):
            start = time.perf_counter()
            fingerprints(held)
            taken = time.perf_counter() - start
        torch.save({"checksum_gb_per_s": COUNT * EACH * 2 / taken / 1e9}, folder / "checksum.pt")
