"""The hybrid engine ``disaggregated``: training and generation are worker groups of their own."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

import torch
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from drivetrain import HybridEngine, Meeting, UserError, WeightStreamError, get_registry, resolve
from drivetrain.weights import Bucket, WeightStream
from drivetrain_hybrid_engine.delivery import Arrival, Chosen, Departure, Description, compared, lent
from drivetrain_hybrid_engine.disaggregated_config import SAME_DEVICE

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

    from drivetrain import RolloutEngine, TrainingBackend, WeightTransport
    from drivetrain_hybrid_engine.disaggregated_config import DisaggregatedConfig

PARTS = ("weights", "kv_cache")
TIMEOUT = timedelta(seconds=Meeting.timeout_s)
Side = Literal["actor", "rollout"]


@dataclass(frozen=True, kw_only=True)
class End:
    """What a rank tells the others when they meet."""

    size: int  # of its group
    device: str
    device_type: str
    communication_backend: str
    sleeps: bool  # a rollout that can


class Disaggregated(HybridEngine):
    """Sends the trainers' weights to the rollouts of another worker group, in buckets.

    All ranks of both groups enter a phase at the same time. A sync has succeeded on all of them or on none; a rank that
    fails says so to the others, which raise as well.

    Attributes:
        transport: carries the weights; None on a rank that trains and has no rollout to send to.
    """

    config: DisaggregatedConfig
    transport: WeightTransport | None = None

    def attach(self, backend: TrainingBackend | None, rollout: RolloutEngine | None) -> None:
        """Take the engine of this worker.

        Raises:
            UserError: there are two.
        """
        if backend is not None and rollout is not None:
            raise UserError("actor and rollout are in one worker", where=f"hybrid_engine {self.config.name}",
                            mend="start a worker group for each, or choose another hybrid engine")  # fmt: skip
        self._backend, self._rollout = backend, rollout
        context = backend.context if backend is not None else rollout.context  # type: ignore[union-attr]
        self._side: Side = "rollout" if backend is None else "actor"
        self._hardware, self._rank, self._size = context.hardware, context.rank, context.world_size
        self._store: Store | None = None
        self._asleep = False
        self._syncs = self._synced = 0  # all of them, and those in a row that did not fail
        self._version: int | None = None  # that the rollouts have; None: none, or they have let it go
        self._described: Description | None = None  # what the first sync sent

    # -- meeting ----------------------------------------------------------------------------------------------------

    def open(self) -> str:
        """Serve the store at which both groups meet, on rank 0, which is where ``MASTER_ADDR`` says."""
        if self._rank != 0:
            return ""
        host = os.environ["MASTER_ADDR"]
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
        self._store = store
        return f"{host}:{store.port}"

    def connect(self, address: str) -> str:
        """Meet: every rank tells the others where it is, from which follows who sends to whom.

        By default rank 0 of those that train sends to all rollouts. With a transport whose ends share a device
        (``weight_transport.same_device``) every rollout receives from a rank of its own device.

        Raises:
            UserError: the transport does not fit where ranks are.
        """
        host, _, port = address.rpartition(":")
        if self._store is None:
            self._store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=TIMEOUT)
        registry = get_registry()
        rollout = None if self._rollout is None else registry.select("rollouts", self._rollout.config.name).spec
        me = End(size=self._size, device=self._hardware.device_uuid(), device_type=self._hardware.device_type,
                 communication_backend=self._hardware.communication_backend,
                 sleeps=rollout is not None and "rollout.sleep" in rollout.provides)  # fmt: skip
        self._store.set(f"{self._side}/{self._rank}", json.dumps(asdict(me)))
        trainers, rollouts = self._ends("actor"), self._ends("rollout")
        self._everyone = len(trainers) + len(rollouts)
        shared = {end.device for end in trainers} & {end.device for end in rollouts}
        self._sleeps = bool(shared) and any(end.sleeps for end in rollouts)
        name = self._chosen([*trainers, *rollouts], shared=bool(shared))
        found = registry.find("weight_transports", name)
        if found.problem:
            raise UserError(found.problem.what, where="hybrid_engine.transport", mend=found.problem.mend)
        places = [[end.device for end in ends] for ends in (trainers, rollouts)]
        sources = senders(*places, same_device=SAME_DEVICE in found.spec.provides)
        self._meet(name, sources)
        return f"weights by {name}"

    def _ends(self, side: Side) -> list[End]:
        assert self._store is not None
        first = End(**json.loads(self._store.get(f"{side}/0")))
        return [End(**json.loads(self._store.get(f"{side}/{rank}"))) for rank in range(first.size)]

    def _chosen(self, ends: Sequence[End], *, shared: bool) -> str:
        """Name of the transport."""
        if self.config.transport != "auto":
            return self.config.transport
        kinds = sorted({(end.device_type, end.communication_backend) for end in ends})
        if len(kinds) > 1:
            said = " and ".join(f"{device} with {backend}" for device, backend in kinds)
            raise UserError(f"the ranks are on different hardware ({said}), which auto has no transport for",
                            where="hybrid_engine.transport", mend="choose gloo, which all have")  # fmt: skip
        ((device_type, backend),) = kinds
        return "ipc" if shared and device_type != "cpu" else backend

    def _meet(self, name: str, sources: Sequence[int]) -> None:
        """Make this rank's end of the transport between one sender and its receivers."""
        assert self._store is not None
        sender = self._rank if self._side == "actor" else sources[self._rank]
        receivers = [rank for rank, source in enumerate(sources) if source == sender]
        if not receivers:
            return
        self._together = PrefixStore(f"sender/{sender}", self._store)
        meeting = Meeting(
            store=PrefixStore("transport", self._together), hardware=self._hardware, size=1 + len(receivers),
            rank=0 if self._side == "actor" else 1 + receivers.index(self._rank),
        )  # fmt: skip
        self.transport = resolve("weight_transports", name)(meeting)

    # -- phases -----------------------------------------------------------------------------------------------------

    def enter_generation(self, version: int) -> Mapping[str, float]:
        """Send the weights, or receive them, unless the rollouts have those of that version.

        Returns:
            ``bytes`` and ``buckets`` that this rank sent, ``seconds`` that it took, ``bandwidth`` (of a rank that
            trains, bytes a second) and ``peak_bytes`` (memory that the device lent beyond what it held before); nothing
            where the rollouts were up to date.

        Raises:
            WeightStreamError: something was missing, doubled, of another shape or dtype, or changed on the way, on
                this rank or another. The rollouts have no weights to rely on until a sync succeeds.
        """
        if version == self._version:
            return {}
        hardware = self._hardware
        hardware.synchronize()
        hardware.reset_peak()
        start, before = time.perf_counter(), hardware.memory().allocated
        self._version = None
        self._syncs += 1
        synced, fingerprints = self._synced + 1, compared(self.config.fingerprint, self._synced)
        self._synced = 0  # unless it ends well
        try:
            if self._backend is not None:
                moved, described = self._send(fingerprints)
            else:
                moved, described = self._receive(version, fingerprints)
        except Exception as error:
            self._end(f"{type(error).__name__}: {error}")
            raise
        self._end()
        self._version, self._described, self._synced = version, self._described or described, synced
        hardware.synchronize()
        seconds = time.perf_counter() - start
        if "bytes" in moved:
            moved["bandwidth"] = moved["bytes"] / seconds
        return {**moved, "seconds": seconds, "peak_bytes": float(max(0, hardware.memory().peak - before))}

    def enter_training(self) -> Mapping[str, float]:
        """Have rollouts that share the trainers' devices give up their memory, if they can; elsewhere all stays."""
        if self._sleeps:
            self._version = None
            if self._rollout is not None and not self._asleep:
                self._rollout.sleep(PARTS)
                self._asleep = True
        return {}

    def _end(self, error: str = "") -> None:
        """Tell the others how this rank's part of a sync ended, and wait for them if it ended well.

        Raises:
            WeightStreamError: another rank failed.
        """
        assert self._store is not None
        sync = PrefixStore(f"sync/{self._syncs}", self._store)
        if error:
            sync.set("error", f"{self._side} rank {self._rank}: {error}")
        if sync.add("ended", 1) == self._everyone:
            sync.set("all", "")
        if error:
            return
        sync.wait(["all"], TIMEOUT)
        if sync.check(["error"]):
            raise WeightStreamError(f"weights did not get to every rollout; {sync.get('error').decode()}")
        if self._side == "actor" and self._rank == 0:  # the keys of the last sync, which all have left
            before = PrefixStore(f"sync/{self._syncs - 1}", self._store)
            for key in ("ended", "all", "error"):
                before.delete_key(key)

    # -- sending ----------------------------------------------------------------------------------------------------

    def _send(self, fingerprints: Chosen | bool) -> tuple[dict[str, float], Description]:
        """Send every weight, or take part in gathering them: a collective call of the ranks that train."""
        assert self._backend is not None
        with lent(self._backend, self.config) as stream:
            departure = Departure(stream, fingerprints=fingerprints)
            try:
                if self.transport is not None:
                    self.transport.send(WeightStream(self._listed(departure)))
            finally:
                departure.drain()
        return {"bytes": float(departure.bytes), "buckets": float(departure.buckets)}, departure.described

    def _listed(self, departure: Departure) -> Iterator[Bucket]:
        """Pass on what leaves; at the end of the first sync, tell the receivers what it was."""
        yield from departure.stream
        if self._described is None:
            listed = {name: (shape, str(dtype)) for name, (shape, dtype) in departure.described.items()}
            self._together.set(f"described/{self._syncs}", json.dumps(listed))

    # -- receiving --------------------------------------------------------------------------------------------------

    def _receive(self, version: int, fingerprints: Chosen | bool) -> tuple[dict[str, float], Description]:
        """Have the rollout take in what is sent. If it fails, the rest is drawn, so that the sender can go on."""
        assert self._rollout is not None and self.transport is not None
        if self._asleep:
            self._rollout.wake(("weights",))
        expected: Description = {} if self._described is None else self._described
        incoming = self.transport.receive()
        checked = WeightStream(self._noted(incoming, expected)) if self._described is None else incoming
        arrival = Arrival(checked, expected, fingerprints=fingerprints)
        try:
            self._rollout.load_weights(arrival.stream, version)
            if not arrival.complete:
                raise WeightStreamError(f"rollout {self._rollout.config.name!r} did not take all weights")
        finally:
            for _ in incoming:
                pass
        if self._asleep:
            self._rollout.wake(("kv_cache",))
            self._asleep = False
        return {}, expected

    def _noted(self, incoming: WeightStream, expected: Description) -> Iterator[Bucket]:
        """Pass on what comes and write it down; at the end, hold it against what the sender says has left."""
        for bucket in incoming:
            for entry in bucket.entries:
                expected.setdefault(entry.name, (entry.shape, entry.dtype))
            yield bucket
        listed = json.loads(self._together.get(f"described/{self._syncs}"))
        left = {name: (tuple(shape), getattr(torch, dtype.removeprefix("torch."))) for name, (shape, dtype) in
                listed.items()}  # fmt: skip
        for name, (shape, dtype) in expected.items():
            if left.get(name) != (shape, dtype):
                sent = f"as {left[name][1]} of shape {left[name][0]}" if name in left else "not at all"
                raise WeightStreamError(f"weight {name!r} came as {dtype} of shape {shape}; it was sent {sent}")
        expected.update(left)


def senders(trainers: Sequence[str], rollouts: Sequence[str], *, same_device: bool) -> list[int]:
    """For each rollout rank the rank that sends to it, from the devices of the ranks of both groups.

    Raises:
        UserError: with ``same_device``, a rollout is on a device that no rank trains on.
    """
    if not same_device:
        return [0] * len(rollouts)
    chosen = []
    for rank, device in enumerate(rollouts):
        there = [trainer for trainer, own in enumerate(trainers) if own == device]
        if not there:
            raise UserError(f"rollout rank {rank} is on a device that no actor rank is on, and the transport stays on "
                            "one device", where="hybrid_engine.transport",
                            mend="give rollout and actor one pool, or choose another transport")  # fmt: skip
        chosen.append(there[rollouts[:rank].count(device) % len(there)])
    return chosen
