"""All that was asked of Ray for one purpose, so that it ends together."""

from __future__ import annotations

import time
from typing import Any

import ray

from drivetrain_executor_ray.pools import Reservation

CLOSE_S = 10.0  # for workers to let go of devices and files by themselves
GONE_S = 10.0  # for Ray to end processes


class Crew:
    """Processes and bundles. A failure of one process ends all of a crew."""

    def __init__(self) -> None:
        self._actors: list[Any] = []
        self._reservations: list[Reservation] = []

    def add(self, actors: list[Any], reservations: list[Reservation]) -> None:
        """Take responsibility."""
        self._actors += actors
        self._reservations += [r for r in reservations if r not in self._reservations]

    def end(self, *, orderly: bool = True) -> None:
        """End all processes and give all bundles back; nothing happens the second time.

        Args:
            orderly: let workers close first; they are ended anyway if that takes long.
        """
        actors, reservations = self._actors, self._reservations
        self._actors, self._reservations = [], []
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
            self._wait(actors)

    @staticmethod
    def _wait(actors: list[Any]) -> None:
        """Until no process answers any more."""
        until = time.monotonic() + GONE_S
        for actor in actors:
            while time.monotonic() < until:
                try:
                    ray.get(actor.where.remote(), timeout=0.2)
                except ray.exceptions.GetTimeoutError:
                    continue
                except ray.exceptions.RayError:
                    break


DEFAULT = Crew()  # of groups that were made without one
