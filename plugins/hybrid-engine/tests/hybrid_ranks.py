"""What two processes do in test_hybrid_ranks and test_hybrid_transports."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import hybrid_meetings
import hybrid_rig as rig
import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain import DataProto, Meeting, RunError, WeightStreamError
from drivetrain.weights import WeightEntry, WeightStream, fingerprint, lend
from drivetrain_hybrid_engine.broadcast import GlooBroadcast
from drivetrain_hybrid_engine.delivery import Arrival, Departure

PROMPTS = [(5, 6, 7), (9, 8, 7), (30, 31, 40), (3, 44, 5)]


def start(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)


def colocated(rank: int, models: dict[str, Path], folder: Path) -> None:
    """Train and generate on both ranks, each model; each writes what it saw to ``folder/MODEL/seen-RANK.pt``."""
    start(rank, folder)
    for name, model in models.items():
        _colocated(rank, model, folder / name)
        dist.barrier()
    dist.destroy_process_group()


def _colocated(rank: int, model: Path, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    pair = rig.Pair(model, rank=rank, world_size=2, bucket_bytes=5000)
    mine = PROMPTS[:3] if rank == 0 else PROMPTS[3:]
    seen: dict[str, object] = {"shares": pair.hybrid.shares, "held": [], "mismatch": [], "tokens": []}
    for version in range(3):
        pair.hybrid.enter_generation(version)
        seen["held"].append(pair.held())
        batch, mismatch = pair.mismatch(mine)
        seen["mismatch"].append(mismatch)
        seen["tokens"].append([c.token_ids for c in pair.generate(mine)])
        (folder / f"state-{version}").mkdir(exist_ok=True)
        pair.backend.save(folder / f"state-{version}")
        pair.hybrid.enter_training()
        parts: list[DataProto] = [None, None]
        dist.all_gather_object(parts, batch)
        pair.update(batch, DataProto.concat(parts))

    if rank == 1:  # one rank's stream is wrong at its second bucket; the other one is not left waiting
        good, pair.hybrid.transport = pair.hybrid.transport, rig.Faulty(doubled_norm)
    try:
        pair.hybrid.enter_generation(3)
        seen["error"] = ""
    except WeightStreamError as error:
        seen["error"] = str(error)
        pair.hybrid.transport = good
    pair.hybrid.enter_generation(4)
    seen["mismatch"].append(pair.mismatch(mine)[1])
    torch.save(seen, folder / f"seen-{rank}.pt")


def doubled_norm(entry: WeightEntry) -> list[WeightEntry]:
    return [entry, entry] if entry.name == "model.layers.0.input_layernorm.weight" else [entry]


TENSORS = {
    "halves": torch.arange(7).bfloat16() / 3, "flags": torch.tensor([True, False, True]), "number": torch.tensor(2.5),
    "nothing": torch.zeros(0, 3), "ids": torch.arange(5), "large": torch.arange(4000.0).reshape(40, 100),
    "turned": torch.arange(12.0).reshape(3, 4).t(),
}  # fmt: skip


def triples(*, fail: bool = False) -> Iterator[tuple[str, Tensor, str | None]]:
    for name, tensor in TENSORS.items():
        yield name, tensor, None
        if name == "large":
            yield "tied", tensor, "large"
            if fail:
                raise RunError("the trainer ran out of luck")


def between_processes(rank: int, model: Path, folder: Path) -> None:
    """Rank 0 trains by itself and sends; rank 1 generates with what it receives."""
    torch.set_num_threads(1)
    pair = rig.Pair(model)
    if rank == 0:
        pair.hybrid.enter_generation(0)
        pair.update(pair.mismatch(PROMPTS)[0])
    store = dist.FileStore(str(folder / "store"), 2)
    transport = GlooBroadcast(Meeting(store=store, rank=rank, size=2, hardware=pair.backend.context.hardware))
    (_receive if rank else _send)(pair, transport, folder)


def _send(pair: rig.Pair, transport: GlooBroadcast, folder: Path) -> None:
    torch.save(pair.trained(), folder / "sent.pt")
    for _ in range(3):
        with pair.backend.weights(bucket_bytes=5000) as stream:
            transport.send(Departure(stream, fingerprints=True).stream)
    with lend(triples(), bucket_bytes=100, version=6) as stream:
        transport.send(Departure(stream, fingerprints=True).stream)
    try:
        with lend(triples(fail=True), bucket_bytes=100) as stream:
            transport.send(stream)
        raise AssertionError("an error in drawing was swallowed")
    except RunError as error:
        assert "luck" in str(error)
    try:
        transport.receive()
        raise AssertionError("the sender received")
    except RunError as error:
        assert "the others receive; this is rank 0" in str(error)


def _receive(pair: rig.Pair, transport: GlooBroadcast, folder: Path) -> None:
    from drivetrain_rollout_hf.engine import HFRollout

    rollout = HFRollout(pair.rollout.config, pair.rollout.context)  # with weights of its own
    rollout.initialize()
    seen: dict[str, object] = {}

    rollout.load_weights(transport.receive(), 1)
    held = rollout._module.state_dict()
    seen["held"] = {name: tensor.clone() for name, tensor in held.items()}
    expected = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in held.items()}
    rollout.load_weights(Arrival(transport.receive(), expected, fingerprints=True).stream, 2)
    wrong = transport.receive()
    try:
        rollout.load_weights(Arrival(_change(wrong), expected, fingerprints=True).stream, 3)
        seen["refused"] = ""
    except WeightStreamError as error:
        seen["refused"] = str(error)
    for _ in wrong:
        pass

    received = []
    for bucket in hybrid_meetings.expiring(transport.receive()):
        assert bucket.version == 6 and bucket.kind == "full"
        for entry in bucket.entries:
            assert entry.alias or entry.fingerprint == fingerprint(entry.tensor)
            tensor = None if entry.alias else entry.tensor.clone()
            received.append((entry.name, entry.shape, entry.dtype, entry.alias, tensor))
    seen["received"] = received

    try:
        list(transport.receive())
    except WeightStreamError as error:
        seen["told"] = str(error)
    torch.save(seen, folder / "seen.pt")


def _change(stream: WeightStream) -> WeightStream:
    faulty = rig.Faulty(rig.flipped)
    faulty.send(stream)
    return faulty.receive()
