"""What a step is doing: who holds the devices, and where the time goes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager


class Phases:
    """Times the phases of a step, and switches between generation and training on demand.

    Args:
        announce: called with the name of each phase that starts.
        switch: called with ``generation`` or ``training`` when the next call needs the other one.
        others: asked for the metrics of a step that are not of a phase.
    """

    def __init__(
        self, announce: Callable[[str], None], switch: Callable[[str], Mapping[str, float]],
        others: Callable[[], Mapping[str, float]] = dict,
    ) -> None:  # fmt: skip
        self._announce = announce
        self._switch, self._others = switch, others
        self._side = "training"
        self._seconds: dict[str, float] = defaultdict(float)
        self._metrics: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str, side: str | None = None) -> Iterator[None]:
        """Time a phase; ``side`` says which side of the hybrid engine it needs."""
        self._announce(name)
        if side is not None and side != self._side:
            with self._timed("sync"):
                self._metrics |= {f"sync/{k}": v for k, v in self._switch(side).items()}
            self._side = side
        with self._timed(name):
            yield

    def weights_changed(self) -> None:
        """Make the next generation fetch the new weights, even if devices are on its side."""
        self._side = "training"

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """Metrics since the last call: ``time/<phase>_s``, those of the switches and the others."""
        out = {f"time/{name}_s": seconds for name, seconds in self._seconds.items()} | self._metrics
        out.update(self._others())
        self._seconds.clear()
        self._metrics = {}
        return out
