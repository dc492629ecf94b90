"""All that was asked of Ray for one purpose, so that it ends together."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import ray

from drivetrain import WorkerError
from drivetrain_executor_ray.pools import Reservation
from drivetrain_executor_ray.process import Whereabouts
from drivetrain_executor_ray.transport import Sent

CLOSE_S = 10.0  # for workers to let go of devices and files by themselves
GONE_S = 10.0  # for Ray to end processes


class Crew:
    """Processes and bundles. A failure of one process ends all of a crew, and is what later calls are told."""

    def __init__(self) -> None:
        self.failure: WorkerError | None = None
        self.under_way: list[Any] = []  # calls, in order
        self.sent = Sent()
        self._actors: list[Any] = []
        self._reservations: list[Reservation] = []
        self._places: list[Whereabouts] = []

    def add(self, actors: list[Any], reservations: list[Reservation]) -> None:
        """Take responsibility."""
        self._actors += actors
        self._reservations += [r for r in reservations if r not in self._reservations]

    def watch(self, places: list[Whereabouts]) -> None:
        """Note where processes are, so that one that runs here is waited for when it ends."""
        self._places += places

    def end(self, *, orderly: bool = True) -> None:
        """End all processes and give all bundles back; nothing happens the second time.

        Args:
            orderly: let workers close first; they are ended anyway if that takes long.
        """
        actors, reservations, places = self._actors, self._reservations, self._places
        self._actors, self._reservations, self._places = [], [], []
        if not ray.is_initialized():
            return
        try:
            if orderly and actors:
                closing = [actor.close.remote() for actor in actors]
                ray.wait(closing, num_returns=len(closing), timeout=CLOSE_S)
        finally:
            for actor in actors:
                ray.kill(actor, no_restart=True)
            for reservation in reservations:
                reservation.remove()
            self._wait(actors, places)

    @staticmethod
    def _wait(actors: list[Any], places: list[Whereabouts]) -> None:
        """Until no process answers any more, and none of this node runs."""
        until = time.monotonic() + GONE_S
        for actor in actors:
            while time.monotonic() < until:
                try:
                    ray.get(actor.where.remote(), timeout=0.2)
                except ray.exceptions.GetTimeoutError:
                    continue
                except ray.exceptions.RayError:
                    break
        here = [place.pid for place in places if place.node_id == ray.get_runtime_context().get_node_id()]
        while any(map(_runs, here)) and time.monotonic() < until:
            time.sleep(0.02)


def _runs(pid: int) -> bool:
    """Whether a process of this node runs; one that ended and waits for its parent does not."""
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat")
        return not state.exists() or state.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def default() -> Crew:
    """The crew of groups that are made without one; a new one after a failure."""
    global _default
    if _default.failure is not None:
        _default = Crew()
    return _default


_default = Crew()
