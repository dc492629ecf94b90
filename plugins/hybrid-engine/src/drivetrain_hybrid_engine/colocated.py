"""The hybrid engine ``colocated``: the two engines of a process take turns on its device."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from drivetrain import HybridEngine, UserError, WeightStreamError, get_registry, resolve
from drivetrain_hybrid_engine.config import SENT, SHARED, offered
from drivetrain_hybrid_engine.delivery import Arrival, Departure, Description

if TYPE_CHECKING:
    from drivetrain import RolloutEngine, TrainingBackend, WeightTransport
    from drivetrain_hybrid_engine.config import ColocatedConfig

PARTS = ("weights", "kv_cache")


class Colocated(HybridEngine):
    """Has the rollout run the trainer's module, or sends it the trainer's weights when it has to have new ones.

    Attributes:
        shares: the two engines are one module, and nothing moves.
        transport: carries the weights where they move.
    """

    config: ColocatedConfig
    shares: bool
    transport: WeightTransport

    def attach(self, backend: TrainingBackend | None, rollout: RolloutEngine | None) -> None:
        """Decide how the two get to the same weights.

        Raises:
            UserError: they can do neither what ``sharing`` asks for nor, with ``auto``, anything else.
        """
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
        self._asleep = False
        self._version: int | None = None  # that the rollout has been sent; None: none, or it has been let go
        self._described: Description | None = None  # what the first sync sent
        if self.shares:
            rollout.attach(backend.live_module())
        else:
            self.transport = resolve("weight_transports", self.config.transport)()

    def enter_generation(self, version: int) -> Mapping[str, float]:
        """Send the weights, unless the rollout has those of that version.

        A collective call where the backend has several ranks.

        Returns:
            ``bytes`` and ``buckets`` that were sent by this process and ``seconds`` that it took; zeros where the
            module is shared; nothing where the rollout was up to date.

        Raises:
            WeightStreamError: something was missing, doubled, of another shape or dtype, or changed on the way. The
                rollout has no usable weights until a sync succeeds.
        """
        if self.shares:
            self._rollout.weight_version = version
            return {"bytes": 0.0, "buckets": 0.0, "seconds": 0.0}
        if version == self._version:
            return {}
        hardware = self._backend.context.hardware
        hardware.synchronize()
        start = time.perf_counter()
        self._version = None
        self._wake("weights")
        sent = self._send(version)
        self._wake("kv_cache")
        self._asleep = False
        self._version = version
        hardware.synchronize()
        seconds = time.perf_counter() - start
        return {"bytes": float(sent.bytes), "buckets": float(sent.buckets), "seconds": seconds}

    def enter_training(self) -> Mapping[str, float]:
        """Have the rollout give up its memory, if it can; it is sent all weights before it generates again."""
        if self._sleeps and not self._asleep:
            self._rollout.sleep(PARTS)
            self._asleep = True
            self._version = None
        return {}

    def _wake(self, part: str) -> None:
        if self._asleep:
            self._rollout.wake((part,))

    def _send(self, version: int) -> Departure:
        """Send every weight through the transport and have the rollout take it in."""
        first = self._described is None
        fingerprints = self.config.fingerprint == "always" or (self.config.fingerprint == "first" and first)
        with self._backend.weights(bucket_bytes=self.config.bucket_bytes) as stream:
            departure = Departure(stream, fingerprints=fingerprints)
            expected = departure.described if self._described is None else self._described
            try:
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
        return departure
