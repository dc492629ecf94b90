"""The tracker ``csv``."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from pathlib import Path

from drivetrain import PluginConfig, RunInfo, Tracker
from drivetrain_trackers.files import first_to_drop, replace_with

FILE = "metrics.csv"


class CsvTracker(Tracker):
    """Writes ``metrics.csv`` into the run folder: a row a logged step, a column a metric.

    A cell is empty where a step has no such metric; ``nan`` and ``inf`` are written so. A metric that appears later
    becomes a column on the right, for which the file is written anew.
    """

    _path: Path

    def __init__(self, config: PluginConfig) -> None:
        super().__init__(config)
        self._columns: list[str] = []

    def started(self, info: RunInfo) -> None:
        self._path = info.run_dir / FILE
        drop = first_to_drop(info.first_step)
        columns, rows = _read(self._path)
        self._columns = columns or ["step"]
        self._write_anew([row for row in rows if int(row["step"]) < drop])

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        row = {"step": str(step), **{name: repr(float(value)) for name, value in metrics.items()}}
        if new := [name for name in row if name not in self._columns]:
            self._columns += new
            self._write_anew([*_read(self._path)[1], row])
        else:
            with self._path.open("a", encoding="utf-8", newline="") as file:
                csv.DictWriter(file, self._columns, restval="").writerow(row)

    def _write_anew(self, rows: list[dict[str, str]]) -> None:
        def write(aside: Path) -> None:
            with aside.open("w", encoding="utf-8", newline="") as file:
                writer = csv.DictWriter(file, self._columns, restval="")
                writer.writeheader()
                writer.writerows(rows)

        replace_with(self._path, write)


def _read(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Columns and rows of the file; what follows its last line end was cut off."""
    if not path.exists():
        return [], []
    with path.open(encoding="utf-8", newline="") as file:
        whole = file.read()
    reader = csv.DictReader(io.StringIO(whole[: whole.rfind("\n") + 1], newline=""))
    rows = list(reader)
    return list(reader.fieldnames or ()), rows
