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
        ranks: called with the name of the phase under way, how many ranks have answered its call, and of how many.
    """

    def __init__(
        self, announce: Callable[[str], None], switch: Callable[[str], Mapping[str, float]],
        others: Callable[[], Mapping[str, float]] = dict,
        ranks: Callable[[str, int, int], None] = lambda *_: None,
    ) -> None:  # fmt: skip
        self._announce = announce
        self._switch, self._others, self._ranks = switch, others, ranks
        self._under_way = ""
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

    def answered(self, done: int, asked: int) -> None:
        """Tell how many ranks have answered, if several were asked in a phase."""
        if asked > 1 and self._under_way:
            self._ranks(self._under_way, done, asked)

    def weights_changed(self) -> None:
        """Make the next generation fetch the new weights, even if devices are on its side."""
        self._side = "training"

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start, self._under_way = time.perf_counter(), name
        try:
            yield
        finally:
            self._under_way = ""
            self._seconds[name] += time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """Metrics since the last call: ``time/<phase>_s``, those of the switches and the others."""
        out = {f"time/{name}_s": seconds for name, seconds in self._seconds.items()} | self._metrics
        out.update(self._others())
        self._seconds.clear()
        self._metrics = {}
        return out
