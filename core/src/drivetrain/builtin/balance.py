"""Items in parts of nearly equal weight."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

Part = tuple[int, list[int]]  # weight and items


def karmarkar_karp(weights: Sequence[int], parts: int, *, equal: bool) -> list[list[int]]:
    """Spread items over parts so that the parts' weights differ little, by the largest differencing method.

    Each item begins as a partition of its own, beside empty parts. The two partitions whose parts differ most become
    one, the heaviest part of either joined by the lightest of the other, until one partition is left (Karmarkar and
    Karp, "The differencing method of set partitioning", UCB/CSD 82/113, 1982). With ``equal`` partitions begin with one
    item in every part, of neighbouring weights, and parts stay equal in number (Michiels, Korst, Aarts and van Leeuwen,
    "Performance ratios for the differencing method applied to the balanced number partitioning problem", 2003).

    Args:
        weights: of each item, not negative.
        equal: no part gets more than ``ceil(items / parts)`` items.

    Returns:
        items of each part, ascending; parts by their first item, empty ones last. It depends on the arguments alone.
    """
    missing = -len(weights) % parts if equal else 0  # items without weight make the number divide
    items = sorted(enumerate([*weights, *[0] * missing]), key=lambda item: -item[1])
    step = parts if equal else 1
    begin: list[list[Part]] = [
        [(weight, [item]) for item, weight in items[start : start + step]] + [(0, [])] * (parts - step)
        for start in range(0, len(items), step)
    ]
    heap = [(part[-1][0] - part[0][0], number, part) for number, part in enumerate(begin)]
    heapq.heapify(heap)
    for number in range(len(begin), 2 * len(begin) - 1):
        one, two = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        joined = [(heavy + light, mine + others) for (heavy, mine), (light, others) in zip(one, reversed(two))]
        joined.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], number, joined))
    last = heap[0][2] if heap else []
    found = [sorted(item for item in part if item < len(weights)) for _, part in last]
    return sorted(found, key=lambda part: part[0] if part else len(weights)) + [[] for _ in range(parts - len(found))]
