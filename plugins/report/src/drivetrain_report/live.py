"""The live view, drawn for the width it is given."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from drivetrain_report.numbers import duration, number, plain, score
from drivetrain_report.progress import Progress

WIDE, WIDEST = 76, 104
BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "_.-=+*#"
PHASE_COLORS = {
    "generate": "cyan", "reward": "yellow", "log_probs": "bright_magenta", "ref_log_probs": "bright_blue",
    "values": "bright_yellow", "update_critic": "bright_cyan", "update": "magenta", "evaluate": "green", "sync": "blue",
    "save": "red",
}  # fmt: skip
CELLS = (
    ("response", "train/response_tokens", "tokens"),
    ("KL", "train/kl", "nats a token"),
    ("KL step", "train/approx_kl", "nats a token"),
    ("entropy", "train/entropy", "nats a token"),
    ("speed", "throughput/tokens_per_s", "tokens/s"),
)
Cell = tuple[str, Text]


class LiveView:
    """A renderable that shows where a run stands; at most 16 lines, whatever happens."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = options.max_width >= WIDE
        inner = min(options.max_width, WIDEST) - (4 if wide else 0)
        with self.progress.lock:
            body = Group(*self._body(inner, wide, options.ascii_only))
        if not wide:
            yield body
            return
        yield Panel(body, width=inner + 4, border_style="bright_black")

    def _body(self, width: int, wide: bool, ascii_only: bool) -> list[RenderableType]:
        cells = self._cells()
        lines: list[RenderableType] = [*self._steps(width, wide), Text("")]
        lines.append(_grid(cells, columns=2 if wide else 1, width=width))
        rewards = [v for _, v in self.progress.history.series("train/reward") if math.isfinite(v)]
        if len(rewards) > 1:
            lines += [Text(""), self._curve(rewards, width, ascii_only)]
        spent = dict(self.progress.phase_s)
        if spent:
            lines += [Text(""), *_shares(spent, width, ascii_only)]
        return lines

    def _steps(self, width: int, wide: bool) -> list[RenderableType]:
        progress = self.progress
        total = progress.steps_planned
        left = progress.remaining_s
        count = f"step {progress.steps_done}/{total}" if total else f"step {progress.steps_done}"
        bar: RenderableType = Text("")
        if total:
            bar = ProgressBar(total=total, completed=progress.steps_done, complete_style="cyan", finished_style="green")
        times = f"{duration(progress.elapsed_s)}, {duration(left)} left" if left else duration(progress.elapsed_s)
        row = Table.grid(padding=(0, 1), expand=False)
        row.width = width
        row.add_column(no_wrap=True, overflow="crop")
        row.add_column(ratio=1)
        row.add_column(no_wrap=True, overflow="crop", justify="right")
        if wide:
            row.add_row(Text(count, style="bold"), bar, Text(times))
            lines: list[RenderableType] = [row]
        else:
            row.add_row(Text(count, style="bold"), bar, Text(""))
            lines = [row, _line(Text(times), width)]
        if progress.phase:
            name, since = progress.phase
            spent = duration(progress.clock() - since)
            ranks = f"  {progress.ranks[0]} of {progress.ranks[1]} ranks done" if progress.ranks else ""
            now = Text.assemble(("now ", "bright_black"), plain(name.replace("_", " ")),
                                (f"  {spent}{ranks}", "bright_black"))  # fmt: skip
            lines.append(_line(now, width))
        return lines

    def _cells(self) -> list[Cell]:
        progress = self.progress
        cells: list[Cell] = []
        reward, evaluations = progress.last("train/reward"), progress.history.series("eval/accuracy")
        if reward is not None:
            cells.append(_cell("reward", score(reward)))
        if evaluations:
            (first_step, first), (step, value) = evaluations[0], evaluations[-1]
            hint = f"was {score(first)} at step {first_step}" if step > first_step else f"step {step}"
            cells.append(_cell("accuracy", score(value), hint))
        for label, name, unit in CELLS:
            last = progress.last(name)
            if last is not None:
                cells.append(_cell(label, number(last), unit))
        return cells

    def _curve(self, values: Sequence[float], width: int, ascii_only: bool) -> Text:
        low, high = min(values), max(values)
        room = max(8, width - len("reward    ") - len(score(low)) - len(score(high)))
        curve = sparkline(values, min(room, 72), ASCII_BLOCKS if ascii_only else BLOCKS)
        return _line(Text.assemble(("reward ", "bright_black"), (score(low), "bright_black"), " ", (curve, "cyan"), " ",
                                   (score(high), "bright_black")), width)  # fmt: skip


def sparkline(values: Sequence[float], width: int, blocks: str = BLOCKS) -> str:
    """A curve of at most ``width`` characters, each the mean of its stretch of values."""
    count = min(width, len(values))
    edges = [round(i * len(values) / count) for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    span = high - low
    if span <= 0:
        return blocks[len(blocks) // 2] * count
    return "".join(blocks[min(len(blocks) - 1, int((m - low) / span * len(blocks)))] for m in means)


def apportion(shares: Sequence[float], cells: int) -> list[int]:
    """Whole cells in proportion to the shares, by largest remainder."""
    total = sum(shares)
    exact = [share / total * cells for share in shares]
    whole = [int(x) for x in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: whole[i] - exact[i])
    for i in by_remainder[: cells - sum(whole)]:
        whole[i] += 1
    return whole


def _cell(label: str, value: str, hint: str = "") -> Cell:
    return label, Text.assemble((value, "bold"), (f"  {hint}" if hint else "", "bright_black"))


def _shares(phase_s: Mapping[str, float], width: int, ascii_only: bool) -> list[RenderableType]:
    phases = sorted(phase_s.items(), key=lambda item: -item[1])
    total = sum(phase_s.values())
    bar = Text("time   ", style="bright_black")
    for (name, _), cells in zip(phases, apportion([s for _, s in phases], max(8, width - 7)), strict=True):
        bar.append((name[0] if ascii_only else "█") * cells, style=PHASE_COLORS[name])
    legend = Text("       ")
    for name, spent in phases:
        entry = f"{name.replace('_', ' ')} {100 * spent / total:.0f}%"
        if legend.cell_len + len(entry) + 4 > width:
            break
        legend.append("# " if ascii_only else "■ ", style=PHASE_COLORS[name])
        legend.append(entry + "  ")
    return [_line(bar, width), _line(legend, width)]


def _grid(cells: Sequence[Cell], columns: int, width: int) -> Table:
    grid = Table.grid(padding=(0, 2), expand=False)
    grid.width = width
    for _ in range(columns):
        grid.add_column(style="bright_black", no_wrap=True, overflow="crop", width=8)
        grid.add_column(ratio=1, no_wrap=True, overflow="crop")
    for at in range(0, len(cells), columns):
        grid.add_row(*(part for cell in cells[at : at + columns] for part in cell))
    return grid


def _line(text: Text, width: int) -> Text:
    text.truncate(width)
    text.no_wrap = True
    return text
