"""Where a rank stands, and how a call is spread over ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Call = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments


@dataclass(frozen=True, kw_only=True)
class RankLayout:
    """Index and size of one rank along data, tensor, pipeline, context and expert parallelism.

    The ranks of a mesh differ in (dp, tp, pp, cp); expert parallelism lies across these and is no axis of its own.
    """

    dp: int = 0
    tp: int = 0
    pp: int = 0
    cp: int = 0
    ep: int = 0
    dp_size: int = 1
    tp_size: int = 1
    pp_size: int = 1
    cp_size: int = 1
    ep_size: int = 1


class DispatchMode(ABC):
    """Split the arguments of a call over ranks, and make one result of theirs.

    An instance serves one call, so that ``collect`` can undo what ``split`` did. Executors use these through
    :func:`drivetrain.dispatch_call`, which passes arguments by name.
    """

    def ranks(self, layouts: Sequence[RankLayout]) -> list[int]:
        """The ranks that execute; nothing is sent to others. ``split`` and ``collect`` see these alone."""
        return list(range(len(layouts)))

    @abstractmethod
    def split(self, layouts: Sequence[RankLayout], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Call]:
        """Give each rank, in order, its positional and keyword arguments; the caller's objects are not changed.

        Raises:
            ValueError: naming an argument that cannot be split over these ranks.
        """

    @abstractmethod
    def collect(self, layouts: Sequence[RankLayout], outputs: Sequence[Any]) -> Any:
        """Make the caller's result of the ranks' results, which are in the order of ``layouts``."""
