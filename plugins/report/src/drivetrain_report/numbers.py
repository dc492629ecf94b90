"""Numbers as people read them: rounded, with units."""

from __future__ import annotations

import math


def as_float(value: object) -> float | None:
    """The number in a logged value; NaN for null, None for what is no number."""
    if value is None:
        return math.nan
    if not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def number(value: float) -> str:
    """About three significant digits: ``0.412``, ``4.81``, ``1,234``, ``3.0e-4``."""
    if not math.isfinite(value):
        return str(float(value))
    size = abs(value)
    if size == 0:
        return "0"
    if size >= 99.95:
        return f"{value:,.0f}"
    if size >= 9.995:
        return f"{value:.1f}"
    if size >= 0.9995:
        return f"{value:.2f}"
    if size >= 0.09995:
        return f"{value:.3f}"
    return f"{value:.4f}" if size >= 0.001 else f"{value:.1e}".replace("e-0", "e-")


def score(value: float) -> str:
    """A reward or a share with three decimals, so that lines of a log align: ``0.412``."""
    return f"{value:.3f}" if not math.isfinite(value) or abs(value) < 1000 else number(value)


def percent(value: float) -> str:
    """A share as a percentage: ``39.8%``."""
    return f"{100 * value:.1f}%" if math.isfinite(value) else str(float(value))


def seconds(value: float) -> str:
    """A short time in seconds: ``0.52 s``."""
    if not math.isfinite(value):
        return f"{float(value)} s"
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:,.{digits}f} s"


def duration(value: float) -> str:
    """A longer time: ``42 s``, ``2 min 36 s``, ``1 h 04 min``."""
    if not math.isfinite(value):
        return "?"
    whole = max(0, round(value))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(whole / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"


def plain(text: str) -> str:
    """Text on one line, without control characters, which a terminal would obey."""
    return "".join(c if c.isprintable() else " " for c in " ".join(text.split()))
