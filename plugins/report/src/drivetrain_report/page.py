"""The page: header, tiles, charts, completions and config of a run."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from drivetrain_report.catalogue import ACCURACY, BESIDES_STEP, DYNAMICS, OTHER_COLOR, PHASES, REWARD, further
from drivetrain_report.charts import Charts, Series
from drivetrain_report.completions import completions
from drivetrain_report.facts import header_facts, plan_line, title
from drivetrain_report.history import History
from drivetrain_report.markup import Html, el, join
from drivetrain_report.numbers import duration, number, percent, score, seconds
from drivetrain_report.outcome import Outcome
from drivetrain_report.scale import smoothing_window

MOST_LINES = 5


@dataclass(frozen=True, kw_only=True)
class Run:
    """All that the page is made from."""

    folder: str
    history: History
    outcome: Outcome
    config: Mapping[str, Any]
    config_text: str
    samples: int


def page(run: Run) -> str:
    """The whole document. It loads nothing: style, script and numbers are inside."""
    charts = Charts(last_step=run.history.last_step)
    body = join(_header(run), _tiles(run.history), _curves(run.history, charts), completions(run.history, run.samples),
                _settings(run))  # fmt: skip
    style, script = _asset("page.css"), _asset("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'"
    points = json.dumps(charts.data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", http_equiv="Content-Security-Policy", content=policy),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("title", f"{title(run.config)} · {run.folder}"),
        el("link", rel="icon", href="data:,"),
        el("style", Html(style)),
    )
    tail = join(
        el("div", id="tip", hidden=True),
        el("script", Html(points), type="application/json", id="points"),
        el("script", Html(script)),
    )
    return "<!doctype html>\n" + el("html", head, el("body", el("main", body), tail), lang="en") + "\n"


def _asset(name: str) -> str:
    return resources.files("drivetrain_report").joinpath(name).read_text("utf-8")


def _header(run: Run) -> Html:
    outcome, history = run.outcome, run.history
    done = outcome.steps_done if outcome.ended_at else history.last_step
    planned = outcome.steps_planned or done
    wall = ("wall time", duration(outcome.wall_s))
    if not outcome.ended_at:
        wall = ("time in logged steps", duration(outcome.wall_s + history.spent_s(outcome.first_step)))
    facts = [*header_facts(run.config), ("steps", f"{done:,} of {planned:,}"), wall, ("run folder", run.folder)]
    if outcome.ended_at:
        facts.append(("ended", outcome.ended_at))
    status = {"": "status unknown", "running": "not ended"}.get(outcome.status, outcome.status)
    parts = [
        el("h1", title(run.config, run.folder), " ", el("span", status, class_=f"status {outcome.status}".strip())),
        el("dl", *(el("div", el("dt", label), el("dd", value)) for label, value in facts), class_="facts"),
    ]
    if outcome.error:
        parts.append(el("pre", outcome.error, class_="error"))
    if outcome.plan:
        parts.append(el("p", el("b", "Plan"), " ", plan_line(outcome.plan), class_="plan"))
    if outcome.notes:
        parts.append(el("ul", *(el("li", note) for note in outcome.notes), class_="notes"))
    return el("header", *parts)


def _tiles(history: History) -> Html | None:
    accuracies, rewards = history.finite("eval/accuracy"), history.finite("train/reward")
    tiles = []
    if accuracies:
        (a, first), (b, last) = accuracies[0], accuracies[-1]
        note = f"step {a} to step {b}, {100 * (last - first):+.1f} points" if b > a else f"step {a}"
        tiles.append(_tile("Accuracy", _change(percent(first), percent(last), b > a), note))
    if rewards:
        n = max(1, min(10, len(rewards) // 5))
        first, last = (sum(v for _, v in part) / n for part in (rewards[:n], rewards[-n:]))
        each = "step" if n == 1 else f"mean of {n} steps"
        note = f"first and last {each}" if len(rewards) > 1 else f"step {rewards[0][0]}"
        tiles.append(_tile("Reward", _change(score(first), score(last), len(rewards) > 1), note))
    medians = (("Tokens a second", "throughput/tokens_per_s", number), ("Time a step", "time/step_s", seconds))
    for label, name, text in medians:
        values = sorted(v for _, v in history.finite(name))
        if values:
            middle = values[len(values) // 2]
            note = f"median of {len(values):,} steps" if len(values) > 1 else "1 step"
            tiles.append(_tile(label, el("b", text(middle)), note))
    return el("section", *tiles, class_="tiles") if tiles else None


def _tile(label: str, value: Html, note: str) -> Html:
    lines = (("label", label), ("value", value), ("note", note))
    return el("div", *(el("span", words, class_=class_) for class_, words in lines), class_="tile")


def _change(first: str, last: str, moved: bool) -> Html:
    if not moved:
        return el("b", last)
    return join(el("span", first, class_="was"), el("span", " → ", class_="was"), el("b", last))


def _curves(history: History, charts: Charts) -> Html:
    if not history.rows:
        return el("section", el("p", "The run has logged no metrics.", class_="intro"))
    shown = {"train/reward", "eval/accuracy", "eval/reward", *DYNAMICS, "time/step_s", *(f"time/{p}_s" for p in PHASES)}
    rewards, more = _reward_lines(history)
    shown |= more
    accuracies, more = _accuracy_lines(history)
    shown |= more
    hero = [charts.lines(REWARD, rewards), charts.lines(ACCURACY, accuracies)]
    grid = [charts.lines(m, [Series(m.title, 0, history.series(name))]) for name, m in DYNAMICS.items()]
    phases = _phases(history, charts)
    rest = [name for name in history.names() if name not in shown]
    small = [charts.lines(further(n), [Series(n, 0, history.series(n), dots=n.startswith("eval/"))], size="small")
             for n in sorted(rest, key=lambda n: (not n.startswith("train/"), n))]  # fmt: skip
    window = smoothing_window(max((len(history.series(name)) for name in history.names()), default=0))
    intro = f"Where a faint line shows each step, the strong line and its number are means of {window} logged steps."
    return el(
        "section",
        el("h2", "Curves"),
        el("p", intro, class_="intro") if charts.smoothed else None,
        _grid("hero", hero),
        _grid("grid", grid),
        _grid("full", [phases]),
        join(el("h2", "Further metrics"), _grid("compact", small)) if any(small) else None,
    )


def _grid(class_: str, figures: Sequence[Html | None]) -> Html | None:
    present = [f for f in figures if f]
    return el("div", *present, class_=class_) if present else None


def _reward_lines(history: History) -> tuple[list[Series], set[str]]:
    total = history.series("train/reward")
    labels = [n for n in history.names() if n.startswith("train/reward/")]
    parts = [n for n in labels if history.series(n) != total][: MOST_LINES - 2]
    lines = [Series("training", 0, total)]
    evaluated = history.series("eval/reward")
    if evaluated and evaluated != history.series("eval/accuracy"):
        lines.append(Series("evaluation", 1, evaluated, dots=True))
    lines += [Series(n.removeprefix("train/reward/"), 2 + i, history.series(n)) for i, n in enumerate(parts)]
    return lines, {*parts, *(n for n in labels if history.series(n) == total)}


def _accuracy_lines(history: History) -> tuple[list[Series], set[str]]:
    overall = history.series("eval/accuracy")
    by_source = [n for n in history.names() if n.startswith("eval/") and n.endswith("/accuracy") and n.count("/") > 1]
    different = [n for n in by_source if history.series(n) != overall]
    sources = different[: MOST_LINES - 2]
    lines = [
        Series("training", 0, history.series("train/accuracy")),
        Series("evaluation", 1, overall, dots=True),
        *(
            Series(n.removeprefix("eval/").removesuffix("/accuracy"), 2 + i, history.series(n), dots=True)
            for i, n in enumerate(sources)
        ),
    ]
    return lines, {"train/accuracy", *(n for n in by_source if n not in different), *sources}


def _phases(history: History, charts: Charts) -> Html | None:
    names = [p for p in PHASES if any(v > 0 for _, v in history.finite(f"time/{p}_s"))]
    rows: list[tuple[int, list[float]]] = []
    for step, row in history.rows.items():
        spent = [row.get(f"time/{p}_s", 0.0) for p in names]
        spent = [v if math.isfinite(v) and v > 0 else 0.0 for v in spent]
        whole = row.get("time/step_s", 0.0)
        known = sum(v for p, v in zip(names, spent) if p not in BESIDES_STEP)
        spent.append(max(0.0, whole - known) if math.isfinite(whole) else 0.0)
        if step > 0 and sum(spent) > 0:
            rows.append((step, spent))
    if not names or not rows:
        return None
    shown = [*(p.replace("_", " ") for p in names), "other"]
    colors = [*(PHASES[p] for p in names), OTHER_COLOR]
    if sum(v[-1] for _, v in rows) <= 0.002 * sum(sum(v) for _, v in rows):
        shown, colors, rows = shown[:-1], colors[:-1], [(step, v[:-1]) for step, v in rows]
    return charts.stacked("Time by phase", "seconds a step", shown, rows, colors)


def _settings(run: Run) -> Html:
    parts = []
    if run.config_text:
        parts.append(el("details", el("summary", "Resolved config"), el("pre", run.config_text, class_="config")))
    if run.history.unreadable:
        lines = "1 line" if run.history.unreadable == 1 else f"{run.history.unreadable:,} lines"
        parts.append(el("p", f"{lines} of metrics.jsonl and samples.jsonl could not be read.", class_="intro"))
    return el("footer", *parts)
