"""Weights from one process to others of a meeting, by the transports that announce them in a store."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hybrid_meetings as meetings
import hybrid_rig as rig
import pytest
import torch
import torch.multiprocessing as multiprocessing
from torch import Tensor
from torch.distributed import HashStore, TCPStore

from drivetrain import Meeting, RunError, UserError, resolve
from drivetrain.weights import lend
from drivetrain_hybrid_engine import folder as folders


def check(folder: Path, transport: str) -> None:
    """Hold what each rank saw against what was lent."""
    told = torch.load(folder / f"{transport}-0.pt")
    assert told[0] == "the trainer ran out of luck"
    assert told[1] == f"rank 1 stopped before it had all weights (weight transport {transport})" and len(told) == 2
    for rank in (1, 2):
        seen = torch.load(folder / f"{transport}-{rank}.pt")
        assert seen["errors"] == ["the sending side failed: RunError: the trainer ran out of luck"]
        assert seen["buckets"][1] == 1 and seen["buckets"][0] == 4
        for factor in (1, 2, 4, 5):
            if (rank, factor) == (1, 4):
                continue
            sent = {t[0]: t[1] for t in meetings.lent(factor=factor) if isinstance(t, tuple)}
            sent |= {"tied": torch.empty(0), "part": torch.full((3, 2), float(factor))}
            rig.assert_same(octets(seen[factor]), octets(sent))


def octets(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.contiguous().view(-1).view(torch.uint8) for name, tensor in tensors.items()}


def test_weights_come_to_every_process(tmp_path: Path) -> None:
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    multiprocessing.spawn(meetings.work, (store.port, tmp_path), nprocs=meetings.SIZE)
    for transport in meetings.TRANSPORTS:
        check(tmp_path, transport)
    assert not list(tmp_path.glob("weights-*"))  # files of folder


def pair(transport: str, timeout_s: float = 60.0) -> tuple[Any, Any]:
    """Two ends in one process."""
    store = HashStore()
    made = resolve("weight_transports", transport)
    return tuple(made(meetings.meeting(store, rank, size=2, timeout_s=timeout_s)) for rank in range(2))


def sending(sender: Any, **options: Any) -> tuple[threading.Thread, list[Exception]]:
    """Send in a thread, and note the error."""
    errors: list[Exception] = []

    def run() -> None:
        try:
            with lend(meetings.lent(**options), bucket_bytes=100) as stream:
                sender.send(stream)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, errors


@pytest.mark.parametrize("transport", meetings.TRANSPORTS)
def test_every_wait_ends(transport: str) -> None:
    sender, receiver = pair(transport, timeout_s=0.2)
    with pytest.raises(RunError, match="rank 0 has sent nothing for 0.2 s"):
        list(receiver.receive())
    sender, receiver = pair(transport, timeout_s=0.2)
    thread, errors = sending(sender)
    thread.join()
    assert "rank 1 was not done with a bucket in 0.2 s" in str(errors[0])


@pytest.mark.parametrize("transport", meetings.TRANSPORTS)
def test_nothing_is_left_in_the_store(transport: str) -> None:
    sender, receiver = pair(transport)
    for _ in range(2):
        thread, errors = sending(sender)
        assert sum(len(bucket.entries) for bucket in receiver.receive()) == len(meetings.DESCRIBED)
        thread.join()
        assert not errors and receiver._meeting.store.num_keys() == 0


@pytest.mark.parametrize("transport", meetings.TRANSPORTS)
def test_a_side_does_what_it_is_there_for(transport: str) -> None:
    sender, receiver = pair(transport)
    with pytest.raises(RunError, match="rank 0 of the meeting sends and the others receive; this is rank 0"):
        sender.receive()
    with pytest.raises(RunError, match="this is rank 1"), lend(meetings.lent(), bucket_bytes=100) as stream:
        receiver.send(stream)


def test_a_buffer_is_shared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing of it is copied where it arrives."""
    sender, receiver = pair("ipc")
    made: list[int] = []
    shared: Callable[..., Any] = sender._shared
    monkeypatch.setattr(sender, "_shared", lambda number, size: (made.append(size), shared(number, size))[1])
    for _ in range(2):
        thread, errors = sending(sender)
        for bucket in receiver.receive():
            views = [entry.tensor for entry in bucket.entries if entry.nbytes]
            buffers = {number: buffer for number, buffer in receiver._buffers.values()}
            held = {buffer.untyped_storage().data_ptr() for buffer in buffers.values()}
            assert {view.untyped_storage().data_ptr() for view in views} <= held
        thread.join()
        assert not errors
    assert len(made) == len(set(made)) <= 4  # two, and where a bucket was larger


def test_memory_of_another_kind_is_not_shared() -> None:
    hardware: Any = SimpleNamespace(device=lambda: torch.device("meta"))
    store = HashStore()
    with pytest.raises(UserError, match="memory of a meta cannot be shared between processes"):
        resolve("weight_transports", "ipc")(Meeting(store=store, rank=0, size=2, hardware=hardware))


def test_a_folder_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(folders.VARIABLE, str(tmp_path / "none"))
    with pytest.raises(UserError, match=r"none is not a folder \(WEIGHT_TRANSPORT_FOLDER\)"):
        pair("folder")


def test_a_folder_that_is_not_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(folders.VARIABLE, str(tmp_path))
    monkeypatch.setattr(folders, "PATIENCE_S", 0.0)
    sender, receiver = pair("folder")
    monkeypatch.setattr(sender, "put", lambda place, bucket: str(tmp_path / "elsewhere"))
    monkeypatch.setattr(sender, "taken", lambda place: None)
    thread, errors = sending(sender)
    with pytest.raises(RunError, match="elsewhere, which is not there for rank 1"):
        list(receiver.receive())
    thread.join()
    assert "rank 1 stopped before it had all weights" in str(errors[0])


def test_a_folder_is_empty_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(folders.VARIABLE, str(tmp_path))
    sender, receiver = pair("folder")
    thread, errors = sending(sender, fails=True)
    drawn = iter(receiver.receive())
    next(drawn)
    assert list(tmp_path.glob("weights-*/*.safetensors"))
    with pytest.raises(Exception, match="out of luck"):
        list(drawn)
    thread.join()
    assert "out of luck" in str(errors[0]) and not list(tmp_path.iterdir())
