"""Meshes, and a pretended execution of a call on their ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from drivetrain.contracts.mesh import DispatchMode, RankLayout


def mesh(**sizes: int) -> list[RankLayout]:
    """The layouts of all ranks, the last axis named running fastest."""
    places = itertools.product(*(range(size) for size in sizes.values()))
    total = {f"{axis}_size": size for axis, size in sizes.items()}
    return [RankLayout(**dict(zip(sizes, place)), **total) for place in places]


def execute(
    mode: DispatchMode, layouts: list[RankLayout], method: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """What the caller gets, where each rank calls ``method(rank, ...)``."""
    ranks = mode.ranks(layouts)
    chosen = [layouts[rank] for rank in ranks]
    calls = mode.split(chosen, args, kwargs)
    return mode.collect(chosen, [method(rank, *a, **k) for rank, (a, k) in zip(ranks, calls, strict=True)])
