"""The tracker ``parquet``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from drivetrain import RunInfo, Tracker
from drivetrain_trackers.files import first_to_drop, replace_with
from drivetrain_trackers.rows import NUMBERS, table

FOLDER = "samples"


class ParquetTracker(Tracker):
    """Writes the samples of each evaluation into ``samples/step-000020.parquet`` of the run folder.

    Columns are ``step`` (int64), ``score`` (double), ``correct`` (bool), and text; an answer that is no text is there
    as JSON. All files have these types, so that the folder reads as one table.
    """

    _folder: Path

    def started(self, info: RunInfo) -> None:
        self._folder = info.run_dir / FOLDER
        self._folder.mkdir(exist_ok=True)
        for path in self._folder.glob("step-*.parquet"):
            step = re.fullmatch(r"step-(\d+)", path.stem)
            if step and int(step[1]) >= first_to_drop(info.first_step):
                path.unlink()

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        import pyarrow
        from pyarrow import parquet

        types = {float: pyarrow.float64(), bool: pyarrow.bool_()}
        columns: dict[str, Any] = {"step": pyarrow.array([step] * len(rows), pyarrow.int64())}
        for name, values in table(rows).items():
            kind = types[NUMBERS[name]] if name in NUMBERS else pyarrow.string()
            columns[name] = pyarrow.array(values, kind)
        made = pyarrow.table(columns)
        replace_with(self._folder / f"step-{step:06d}.parquet",
                     lambda aside: parquet.write_table(made, aside, compression="zstd"))  # fmt: skip
