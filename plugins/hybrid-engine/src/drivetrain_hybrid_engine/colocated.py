"""The hybrid engine ``colocated``: the two engines of a process take turns on its device."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING

from drivetrain import HybridEngine, RunError, UserError, WeightStreamError, get_registry, resolve
from drivetrain_hybrid_engine.config import SENT, SHARED, offered
from drivetrain_hybrid_engine.delivery import Arrival, Departure, Description, compared, lent

if TYPE_CHECKING:
    from drivetrain import RolloutEngine, TrainingBackend, WeightTransport
    from drivetrain_hybrid_engine.config import ColocatedConfig

logger = logging.getLogger(__name__)

PARTS = ("weights", "kv_cache")
"""What a rollout that sleeps gives up, in the order in which it takes it back."""

WHERE = "hybrid engine colocated"


class State(Enum):
    """Who has the device."""

    DETACHED = "not attached to its two engines"
    SWITCHING = "in the middle of a switch"  # which ends in one of the following, also by an error
    TRAINING = "training"  # a rollout that can sleep does, unless it has just been made or its sleep failed
    GENERATING = "generating"  # with weights of one version; what the trainer offloads is in host memory


class Colocated(HybridEngine):
    """Has the rollout run the trainer's module, or sends it the trainer's weights when it has to have new ones.

    An error in a switch leaves state TRAINING: what the trainer offloads is in host memory, and can be brought; the
    rollout sleeps, and where its sleep failed the next switch begins with it; the next sync sends all weights.

    Attributes:
        transport: carries the weights where they move.
        state: who has the device.
    """

    config: ColocatedConfig
    transport: WeightTransport
    state = State.DETACHED

    def attach(self, backend: TrainingBackend | None, rollout: RolloutEngine | None) -> None:
        """Decide how the two get to the same weights.

        Raises:
            RunError: it has been called before.
            UserError: they can do neither what ``sharing`` asks for nor, with ``auto``, anything else.
        """
        if self.state is not State.DETACHED:
            raise RunError(f"engines cannot be attached: it is {self.state.value}", where=WHERE)
        assert backend is not None and rollout is not None  # one group has both
        self._backend, self._rollout = backend, rollout
        capabilities = offered(get_registry(), backend.config.name, rollout.config.name)
        one_process = backend.context.world_size == 1
        wish = self.config.sharing
        stays = "parameters" not in backend.offloads
        self.shares = wish == "always" or (wish == "auto" and one_process and stays and capabilities >= SHARED)
        needed = SHARED if self.shares else SENT
        if not capabilities >= needed:
            lacking = " and ".join(sorted(needed - capabilities))
            raise UserError(
                f"with {backend.context.world_size} processes weights have to be sent, and {lacking} is not there",
                where="hybrid_engine", mend="choose another backend or rollout, or run in one process",
            )  # fmt: skip
        self._sleeps = "rollout.sleep" in capabilities and not self.shares
        self._awake = list(PARTS)  # parts of the rollout that are on the device, or may be
        self._version: int | None = None  # that the rollout has been sent; None: none, or it has been let go
        self._described: Description | None = None  # what the first sync sent
        self._synced = 0  # syncs in a row that did not fail
        if self.shares:
            rollout.attach(backend.live_module())
        else:
            self.transport = resolve("weight_transports", self.config.transport)()
        self.state = State.TRAINING

    @contextmanager
    def generation(self, version: int) -> Iterator[Mapping[str, float]]:
        """Generate inside, with the weights of that version; afterwards all of the trainer is on the device.

        For programs that call the two engines themselves. Workers enter the states by the methods below, and bring back
        of the trainer what a call needs.

        Yields:
            what :meth:`enter_generation` returns.

        Raises:
            RunError: it is not training.
        """
        if self.state is not State.TRAINING:
            raise RunError(f"generation cannot begin: it is {self.state.value}", where=WHERE)
        try:
            metrics = self.enter_generation(version)
            try:
                yield metrics
            finally:
                self.enter_training()
        finally:
            if self._backend.offloads:
                self._backend.onload(self._backend.offloads)

    def enter_generation(self, version: int) -> Mapping[str, float]:
        """Send the weights, unless the rollout has those of that version, and give it the device.

        In this order: what the trainer offloads leaves, but for its parameters; the rollout's weights wake and are
        loaded; the parameters leave; the rollout's keys and values wake. Where it generates with another version, it
        sleeps first. A collective call where the backend has several ranks.

        Returns:
            ``bytes`` and ``buckets`` that were sent by this process, ``seconds`` that it took, ``bandwidth`` (bytes a
            second from the first bucket to the last), ``peak_bytes`` (memory that the device lent for that beyond what
            it held before); where the rollout sleeps, ``wake_s`` and ``sleep_s``. Zeros for the first three where the
            module is shared; nothing where the rollout was up to date.

        Raises:
            RunError: in the middle of a switch, or before :meth:`attach`.
            WeightStreamError: something was missing, doubled, of another shape or dtype, or changed on the way. The
                rollout has no usable weights until a sync succeeds.
        """
        other = self.state is State.GENERATING and version != self._version
        slept = self.enter_training() if other else {}
        with self._switch(State.GENERATING):
            if not self.shares and version != self._version:
                return {**slept, **self._sync(version)}
            self._offload()
            if not self.shares:
                return {}
            self._rollout.weight_version = self._version = version
            return dict.fromkeys(("bytes", "buckets", "seconds"), 0.0)

    def enter_training(self) -> Mapping[str, float]:
        """Have the rollout give up its memory, if it can; it is sent all weights before it generates again.

        Returns:
            ``sleep_s``, if it was put to sleep.

        Raises:
            RunError: in the middle of a switch, or before :meth:`attach`.
        """
        with self._switch(State.TRAINING):
            return self._sleep()

    @contextmanager
    def _switch(self, to: State) -> Iterator[None]:
        if self.state in (State.DETACHED, State.SWITCHING):
            raise RunError(f"{to.value} cannot begin: it is {self.state.value}", where=WHERE)
        self.state, end = State.SWITCHING, State.TRAINING
        try:
            yield
            end = to
        finally:
            self.state = end

    def _sync(self, version: int) -> dict[str, float]:
        start = self._now()
        spent = self._sleep()
        self._version = None
        try:
            self._offload(keep="parameters")
            if "parameters" in self._backend.offloads:
                self._backend.onload({"parameters"})
            sent, metrics = self._send(version)
            self._offload()
            self._backend.context.hardware.empty_cache()  # the rollout cannot take what torch has cached of the buckets
            metrics["wake_s"] += self._wake("kv_cache")
        except Exception:
            self._synced = 0
            self._retreat()
            raise
        self._version, self._synced = version, self._synced + 1
        if not self._sleeps:
            del metrics["wake_s"]
        seconds = self._now() - start
        return {"bytes": float(sent.bytes), "buckets": float(sent.buckets), "seconds": seconds, **spent, **metrics}

    def _send(self, version: int) -> tuple[Departure, dict[str, float]]:
        """Wake the rollout's weights, send every weight through the transport and have the rollout take it in."""
        hardware = self._backend.context.hardware
        hardware.reset_peak()
        before = hardware.memory().allocated
        fingerprints = compared(self.config.fingerprint, self._synced)
        with lent(self._backend, self.config) as stream:
            departure = Departure(stream, fingerprints=fingerprints)
            expected = departure.described if self._described is None else self._described
            try:
                woken = self._wake("weights")
                start = self._now()
                self.transport.send(departure.stream)
                arrival = Arrival(self.transport.receive(), expected, fingerprints=fingerprints)
                self._rollout.load_weights(arrival.stream, version)
            except Exception:
                departure.drain()
                raise
            if not arrival.complete:
                departure.drain()
                raise WeightStreamError(f"rollout {self._rollout.config.name!r} did not take all weights")
        self._described = expected
        bandwidth = departure.bytes / (self._now() - start)
        peak = float(max(0, hardware.memory().peak - before))
        return departure, {"bandwidth": bandwidth, "peak_bytes": peak, "wake_s": woken}

    def _retreat(self) -> None:
        """Have the device ready for training after an error, which is told, and not what fails here because of it."""
        for step in (self._offload, self._sleep):
            try:
                step()
            except Exception:
                logger.exception("after a sync that failed")

    def _offload(self, *, keep: str = "") -> None:
        if parts := self._backend.offloads - {keep}:
            self._backend.offload(parts)

    def _wake(self, part: str) -> float:
        """Seconds that it took to give the rollout memory for a part."""
        if not self._sleeps:
            return 0.0
        start = self._now()
        self._awake.append(part)
        self._rollout.wake((part,))
        return self._now() - start

    def _sleep(self) -> dict[str, float]:
        """Have a rollout that can give up what memory it has."""
        if not (self._sleeps and self._awake):
            return {}
        start = self._now()
        self._version = None
        self._rollout.sleep(tuple(self._awake))
        self._awake.clear()
        return {"sleep_s": self._now() - start}

    def _now(self) -> float:
        """Seconds, when the device has done what it was given."""
        self._backend.context.hardware.synchronize()
        return time.perf_counter()
