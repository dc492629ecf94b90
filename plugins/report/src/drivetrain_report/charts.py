"""Line charts and stacked bars: stretched inline SVG for the marks, HTML for the words.

The marks lie in a box of 1000 x 1000 that takes whatever size the page gives it; strokes keep their width and text its
size, on a phone as on a wall.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from drivetrain_report.catalogue import Measure
from drivetrain_report.markup import Html, el, join, text
from drivetrain_report.numbers import number, percent, seconds
from drivetrain_report.scale import (
    Axis,
    is_noisy,
    moving_mean,
    smoothing_window,
    spread,
    step_axis,
    thin,
    tick_labels,
    value_axis,
)

BOX = 1000
HOVER_POINTS = 500
DRAWN_POINTS = 1500
BARS = 60
NAME_LENGTH = 14
FEW = 12


@dataclass
class Series:
    """A line: its name, its colour's number and its points; ``dots`` marks each point."""

    name: str
    color: int
    points: Sequence[tuple[int, float]]
    dots: bool = False


@dataclass
class Charts:
    """Draws charts that share their axis of steps, and keeps the numbers that hovering shows.

    Attributes:
        last_step: right end of the axis of steps.
        data: a record a chart, for the script of the page.
        smoothed: whether some line is a moving mean.
    """

    last_step: int
    data: list[dict[str, Any]] = field(default_factory=list)
    smoothed: bool = False

    def lines(self, measure: Measure, series: Sequence[Series], *, size: str = "") -> Html | None:
        """A line chart; None if no series has a finite point."""
        series = [s for s in series if any(math.isfinite(v) for _, v in s.points)]
        if not series:
            return None
        x = step_axis(0, max(1, self.last_step))
        if size == "small":
            x = Axis(x.low, x.high, (x.low, x.high))
        y = value_axis([v for s in series for _, v in s.points], floor=measure.floor, ceiling=measure.ceiling,
                       count=2 if size == "small" else 4)  # fmt: skip
        marks = [_rules(y)]
        ends = []
        for s in series:
            values = [v for _, v in s.points]
            means = None if s.dots else _means(values, y)
            if means is None:
                marks.append(_path(x, y, s.points, f"line c{s.color}"))
            else:
                self.smoothed = True
                smooth = list(zip((step for step, _ in s.points), means, strict=True))
                marks += [_path(x, y, s.points, f"faint c{s.color}"), _path(x, y, smooth, f"line c{s.color}")]
            if s.dots or len(values) <= FEW:
                marks.append(_dots(x, y, s.points, s.color))
            ends.append((s, [v for v in means or values if math.isfinite(v)][-1]))
        labels = _end_labels(y, ends, measure, named=len(series) > 1, gap=0.2 if size == "small" else 0.09)
        self._record(x, [_hover(s.name, s.color, s.points, measure.text) for s in series])
        legend = _legend([(s.name, s.color) for s in series]) if len(series) > 1 else None
        plot = self._plot(x, y, join(*marks), labels, measure.title, names=[s.name for s in series],
                          axis_text=measure.text)  # fmt: skip
        return _figure(measure.title, measure.unit, legend, plot, _omitted(y, series), size)

    def stacked(self, title: str, unit: str, names: Sequence[str], rows: Sequence[tuple[int, Sequence[float]]],
                colors: Sequence[int]) -> Html | None:  # fmt: skip
        """Bars of stacked times, each the mean of some steps."""
        if not rows:
            return None
        bins = _bins(rows, len(names))
        x = step_axis(0.5, rows[-1][0] + 0.5)
        y = value_axis([sum(values) for *_, values in bins], floor=0.0)
        marks = [_rules(y)]
        hover: list[list[Any]] = [[] for _ in names]
        for first, last, _, values in bins:
            base = 0.0
            left, right = BOX * x.at(first - 0.5), BOX * x.at(last + 0.5)
            gap = min(3.0, 0.2 * (right - left))
            for i, value in enumerate(values):
                if value > 0:
                    top, bottom = BOX * (1 - y.at(base + value)), BOX * (1 - y.at(base))
                    marks.append(el("rect", x=_n(left + gap / 2), y=_n(top), width=_n(right - left - gap),
                                    height=_n(bottom - top), class_=f"bar f{colors[i]}"))  # fmt: skip
                base += value
                hover[i].append(seconds(value) if value > 0 else None)
        centres = [(first + last) / 2 for first, last, *_ in bins]
        said = [words for _, _, words, _ in bins]
        self._record(x, [{"n": n, "c": c, "x": centres, "t": t} for n, c, t in zip(names, colors, hover, strict=True)],
                     said)  # fmt: skip
        totals = [sum(values[i] for _, values in rows) for i in range(len(names))]
        whole = sum(totals) or 1.0
        shares = [(f"{n} {100 * t / whole:.0f}%", c) for n, t, c in zip(names, totals, colors, strict=True)]
        plot = self._plot(x, y, join(*marks), None, title, names=(), axis_text=seconds)
        return _figure(title, unit, _legend(shares), plot, None, "wide")

    def _record(self, x: Axis, series: list[dict[str, Any]], said: list[str] | None = None) -> None:
        self.data.append({"lo": x.low, "hi": x.high, "s": series, **({"said": said} if said else {})})

    def _plot(self, x: Axis, y: Axis, marks: Html, labels: Html | None, title: str, *, names: Sequence[str],
              axis_text: Callable[[float], str]) -> Html:  # fmt: skip
        if axis_text is percent:
            words = [f"{label}%" for label in tick_labels([100 * t for t in y.ticks])]
        else:
            words = tick_labels(y.ticks)
        svg = el("svg", marks, viewBox=f"0 0 {BOX} {BOX}", preserveAspectRatio="none", role="img", aria_label=title)
        y_words = [
            el("span", w, class_="ty", style=f"top:{_pct(1 - y.at(t))}") for t, w in zip(y.ticks, words, strict=True)
        ]
        x_words = [
            el("span", w, class_="tx", style=f"left:{_pct(x.at(t))}")
            for t, w in zip(x.ticks, tick_labels(x.ticks), strict=True)
        ]
        inside = el("div", svg, *y_words, *x_words, el("span", "step", class_="tx axis"), labels,
                    el("i", class_="cross"), class_="area")  # fmt: skip
        room = f"--named:{64 + 7 * min(NAME_LENGTH, max(map(len, names)))}px" if len(names) > 1 else None
        return el("div", inside, class_="plot named" if room else "plot", style=room, data_chart=len(self.data) - 1)


def _means(values: Sequence[float], y: Axis) -> list[float] | None:
    """The smoothed line, None for a series that needs none. What lies beyond the axis counts as its end."""
    window = smoothing_window(len(values))
    inside = [min(max(v, y.low), y.high) if math.isfinite(v) else v for v in values]
    means = moving_mean(inside, window)
    return means if window > 1 and is_noisy(inside, means) else None


def _rules(y: Axis) -> Html:
    grid = [el("path", d=f"M0 {_n(BOX * (1 - y.at(t)))}H{BOX}", class_="zero" if t == 0 else "rule") for t in y.ticks]
    return join(*grid)


def _path(x: Axis, y: Axis, points: Sequence[tuple[int, float]], class_: str) -> Html:
    """A line, interrupted where values are not finite; a long one keeps the extremes of each stretch.

    A stretch begins with a line of no length, so that a point by itself is seen.
    """
    commands, pen_down = [], False
    for step, value in _extremes(points):
        if not math.isfinite(value):
            pen_down = False
            continue
        at = f"{_n(BOX * x.at(step))} {_n(_clamped(y, value))}"
        commands.append(f"L{at}" if pen_down else f"M{at}h0")
        pen_down = True
    return el("path", d="".join(commands), class_=class_)


def _dots(x: Axis, y: Axis, points: Sequence[tuple[int, float]], color: int) -> Html:
    """Round dots: lines without length and with round caps, because a stretched circle is none."""
    d = "".join(f"M{_n(BOX * x.at(s))} {_n(_clamped(y, v))}h0" for s, v in points if math.isfinite(v))
    return el("path", d=d, class_=f"dots c{color}")


def _extremes(points: Sequence[tuple[int, float]]) -> Sequence[tuple[int, float]]:
    if len(points) <= DRAWN_POINTS:
        return points
    size = math.ceil(2 * len(points) / DRAWN_POINTS)
    kept: list[tuple[int, float]] = []
    for at in range(0, len(points), size):
        part = points[at : at + size]
        if any(not math.isfinite(v) for _, v in part):
            kept += part
        else:
            kept += sorted({min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])})
    return kept


def _clamped(y: Axis, value: float) -> float:
    """Height in the box; what lies beyond the axis is drawn at its end."""
    return BOX * (1 - min(1.0, max(0.0, y.at(value))))


def _end_labels(y: Axis, ends: Sequence[tuple[Series, float]], measure: Measure, *, named: bool, gap: float) -> Html:
    tops = spread([1 - min(1.0, max(0.0, y.at(last))) for _, last in ends], gap)
    labels = []
    for (s, last), top in zip(ends, tops, strict=True):
        words = [el("b", measure.text(last)), el("span", f" {s.name}") if named else None]
        labels.append(el("span", *words, class_=f"end k{s.color}", style=f"top:{_pct(top)}", title=s.name))
    return join(*labels)


def _hover(name: str, color: int, points: Sequence[tuple[int, float]], write: Callable[[float], str]) -> dict[str, Any]:
    kept = [points[i] for i in thin(len(points), HOVER_POINTS)]
    return {"n": name, "c": color, "x": [step for step, _ in kept], "t": [write(value) for _, value in kept]}


def _bins(rows: Sequence[tuple[int, Sequence[float]]], width: int) -> list[tuple[int, int, str, list[float]]]:
    """First step, last step, what to call them, and means of the values."""
    size = max(1, math.ceil(len(rows) / BARS))
    out: list[tuple[int, int, str, list[float]]] = []
    before = 0
    for at in range(0, len(rows), size):
        part = rows[at : at + size]
        means = [sum(values[i] for _, values in part) / len(part) for i in range(width)]
        first, last = part[0][0], part[-1][0]
        out.append((before + 1, last, f"step {last}" if len(part) == 1 else f"steps {first} to {last}, mean", means))
        before = part[-1][0]
    return out


def _legend(entries: Sequence[tuple[str, int]]) -> Html:
    return el("ul", *(el("li", name, class_=f"k{color}") for name, color in entries), class_="legend")


def _omitted(y: Axis, series: Sequence[Series]) -> Html | None:
    values = [(step, v) for s in series for step, v in s.points]
    notes = []
    outside = [v for _, v in values if math.isfinite(v) and not y.low <= v <= y.high]
    if outside:
        farthest = max(outside, key=abs)
        notes.append(f"{_points(len(outside))} beyond the axis, the farthest {number(farthest)}")
    broken = sorted({step for step, v in values if not math.isfinite(v)})
    if broken:
        where = ", ".join(map(str, broken[:3])) + (", ..." if len(broken) > 3 else "")
        notes.append(f"not finite at step {where}")
    return el("p", "; ".join(notes), class_="omitted") if notes else None


def _points(count: int) -> str:
    return "1 point" if count == 1 else f"{count:,} points"


def _figure(title: str, unit: str, legend: Html | None, plot: Html, note: Html | None, size: str) -> Html:
    caption = el("figcaption", el("b", *_breakable(title)), " ", el("span", unit, class_="unit"), note, legend)
    return el("figure", caption, plot, class_=f"chart {size}".strip())


def _breakable(name: str) -> list[Html]:
    """A metric's name that may wrap after its separators."""
    return [part for word in re.findall(r"[^_/]*[_/]?", name) for part in (text(word), el("wbr")) if word]


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _pct(share: float) -> str:
    return f"{100 * share:.2f}%"
