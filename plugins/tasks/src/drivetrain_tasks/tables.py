"""The datasets ``csv`` and ``parquet``."""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING

from drivetrain import Example, UserError, example_from_record

if TYPE_CHECKING:
    from drivetrain_tasks.configs import CsvConfig, ParquetConfig


class CsvDataset(list[Example]):
    """The examples of a CSV file, one a line below the header; values may be quoted and then span lines."""

    def __init__(self, config: CsvConfig) -> None:
        """Read the file. Raises UserError with file and line for what is no example."""
        path = config.path
        try:
            with path.open(encoding="utf-8-sig", newline="") as file:
                rows = csv.DictReader(file, delimiter=config.delimiter, strict=True)
                for record in rows:
                    where = f"{path}:{rows.line_num}"
                    if None in record or None in record.values():
                        raise UserError("the line has more or fewer values than the header", where=where,
                                        mend="mend the line, or set delimiter")  # fmt: skip
                    self.append(example_from_record(record, config, source=path.stem, where=where))
                    if len(self) == config.limit:
                        break
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise UserError(f"cannot read the data file: {error}", where=str(path), mend="set path") from error


class ParquetDataset(list[Example]):
    """The examples of a Parquet file, or of all files in a folder, one a row."""

    def __init__(self, config: ParquetConfig) -> None:
        """Read the rows. Raises UserError with file and row (from 0) for what is no example."""
        import pyarrow
        from pyarrow import parquet

        path = config.path
        try:
            table = parquet.read_table(path)
        except (OSError, pyarrow.ArrowException) as error:
            raise UserError(f"cannot read the data file: {error}", where=str(path), mend="set path") from error
        for number, record in enumerate(table.slice(0, config.limit).to_pylist()):
            where = f"{path}: row {number}"
            self.append(example_from_record(record, config, source=path.stem, where=where))
