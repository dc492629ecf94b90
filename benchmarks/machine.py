"""What stands at the head of a file of results: date, machine, versions, command."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path


def head(title: str, rows: Mapping[str, str], arguments: Sequence[str]) -> list[str]:
    """The lines of a title and a table. The command stands without the paths of this machine."""
    command = " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *map(shlex.quote, arguments)])
    date = datetime.date.today().isoformat()
    everything = {"date": date, "machine": machine(), **rows, "command": f"`{command}`"}
    return [f"# {title}", "", *table(["", ""], everything.items())]


def machine() -> str:
    """The CPU and its cores."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return f"{model}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}"


def versions(*distributions: str) -> str:
    """Python's version and those of some distributions."""
    found = [f"{name} {importlib.metadata.version(name)}" for name in distributions]
    return ", ".join([f"Python {platform.python_version()}", *found])


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table in Markdown; columns after the first stand to the right."""
    lines = [titles, ["---", *["---:" if title else "---" for title in titles[1:]]], *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]
