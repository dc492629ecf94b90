"""Axes: domains, ticks, smoothing and labels that do not overlap."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Axis:
    """A linear axis; ``at`` maps it to 0..1."""

    low: float
    high: float
    ticks: tuple[float, ...]

    def at(self, value: float) -> float:
        """Position of a value."""
        return (value - self.low) / (self.high - self.low)


def value_axis(
    values: Sequence[float], *, floor: float | None = None, ceiling: float | None = None, count: int = 4
) -> Axis:
    """An axis that holds the values, with a little room where they do not end on a tick.

    A few values far beyond all others would flatten the rest; they are left outside.
    """
    low, high = _bulk(values)
    low = low if floor is None else min(low, floor)
    high = high if ceiling is None else max(high, ceiling)
    if high - low <= 1e-12 * max(abs(low), abs(high)):
        pad = abs(high) * 0.1 or 1.0
        low, high = (low if floor is not None and low == floor else low - pad), high + pad
    step = nice_step((high - low) / count)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    room = 0.08 * (high - low)
    bottom, top = max(first * step, low - room), min(last * step, high + room)
    ticks = tuple(i * step for i in range(first, last + 1))
    inside = tuple(t for t in ticks if bottom - 1e-9 * step <= t <= top + 1e-9 * step)
    return Axis(bottom, top, inside) if len(inside) > 1 else Axis(ticks[0], ticks[-1], ticks)


def step_axis(low: float, high: float, count: int = 5) -> Axis:
    """An axis of steps, from edge to edge, with ticks on whole numbers."""
    if high <= low:
        high = low + 1
    step = max(1, round(nice_step((high - low) / count)))
    first = math.ceil(low / step)
    return Axis(low, high, tuple(float(i * step) for i in range(first, math.floor(high / step) + 1)))


def nice_step(rough: float) -> float:
    """The least of 1, 2, 2.5 and 5 times a power of ten that is not below ``rough``."""
    power = 10.0 ** math.floor(math.log10(rough))
    for factor in (1, 2, 2.5, 5, 10):
        if rough <= factor * power * (1 + 1e-9):
            return float(factor * power)
    return float(10 * power)


def tick_labels(ticks: Sequence[float]) -> list[str]:
    """Ticks written alike, with as many decimals as their distance needs."""
    size = max(abs(t) for t in ticks)
    gap = min((b - a for a, b in pairwise(ticks)), default=size) or 1.0
    for unit, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= unit:
            unit = 1e3 if suffix == "k" else unit
            return [_trim(t / unit, gap / unit) + suffix if t else "0" for t in ticks]
    if 0 < size < 1e-3:
        return [f"{t:.1e}".replace(".0e", "e").replace("e-0", "e-") if t else "0" for t in ticks]
    return [_trim(t, gap) for t in ticks]


def moving_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean of the finite values within half a window on either side; NaN where there is none."""
    half = window // 2
    sums, counts = [0.0], [0]
    for v in values:
        ok = math.isfinite(v)
        sums.append(sums[-1] + (v if ok else 0.0))
        counts.append(counts[-1] + ok)
    out = []
    for i in range(len(values)):
        a, b = max(0, i - half), min(len(values), i + half + 1)
        n = counts[b] - counts[a]
        out.append((sums[b] - sums[a]) / n if n else math.nan)
    return out


def smoothing_window(count: int) -> int:
    """Points that a smoothed line averages over: 1 (none) for a short run, else about a 25th of it, odd."""
    return 1 if count < 40 else count // 25 // 2 * 2 + 3


def is_noisy(values: Sequence[float], smooth: Sequence[float]) -> bool:
    """Whether values scatter around their moving mean; a schedule or a slow curve does not."""
    pairs = [(v, m) for v, m in zip(values, smooth, strict=True) if math.isfinite(v) and math.isfinite(m)]
    if not pairs:
        return False
    span = max(v for v, _ in pairs) - min(v for v, _ in pairs)
    return sum(abs(v - m) for v, m in pairs) > 0.01 * span * len(pairs)


def thin(count: int, limit: int) -> list[int]:
    """Indices of at most about ``limit`` points, evenly spaced, the last one included."""
    stride = max(1, math.ceil(count / limit))
    kept = list(range(0, count, stride))
    return kept if not count or kept[-1] == count - 1 else [*kept, count - 1]


def spread(positions: Sequence[float], gap: float, high: float = 1.0) -> list[float]:
    """Move positions apart until they are ``gap`` from each other, within 0..``high`` as far as they fit."""
    order = sorted(range(len(positions)), key=lambda i: positions[i])
    placed = [min(max(positions[i], 0.0), high) for i in order]
    for i in range(1, len(placed)):
        placed[i] = max(placed[i], placed[i - 1] + gap)
    if placed and placed[-1] > high:
        placed[-1] = high
        for i in range(len(placed) - 2, -1, -1):
            placed[i] = min(placed[i], placed[i + 1] - gap)
    out = [0.0] * len(positions)
    for i, position in zip(order, placed, strict=True):
        out[i] = position
    return out


def _bulk(values: Sequence[float]) -> tuple[float, float]:
    ordered = sorted(v for v in values if math.isfinite(v))
    if not ordered:
        return 0.0, 1.0
    low, high = ordered[0], ordered[-1]
    if len(ordered) < 20:
        return low, high
    inner_low, inner_high = ordered[len(ordered) // 50], ordered[-1 - len(ordered) // 50]
    reach = 6 * (inner_high - inner_low)
    if reach <= 0:
        return low, high
    return max(low, inner_low - reach), min(high, inner_high + reach)


def _trim(value: float, gap: float) -> str:
    digits = max(0, -math.floor(math.log10(gap) + 1e-9))
    if abs(gap * 10**digits - round(gap * 10**digits)) > 1e-6:
        digits += 1
    return f"{value:,.{digits}f}"
