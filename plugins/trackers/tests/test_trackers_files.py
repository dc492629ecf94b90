"""The trackers ``csv`` and ``parquet``."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet
import pytest

from drivetrain_trackers.configs import CsvTrackerConfig, ParquetTrackerConfig
from drivetrain_trackers.metrics_csv import CsvTracker
from drivetrain_trackers.samples_parquet import ParquetTracker

Tell = Callable[..., None]


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_table_widens(tmp_path: Path, tell: Tell) -> None:
    """Metrics that appear later become columns on the right; a cell without a metric is empty."""
    tell(CsvTracker(CsvTrackerConfig(name="csv")), tmp_path, range(3))
    got = rows(tmp_path / "metrics.csv")
    assert list(got[0]) == ["step", "eval/accuracy", "train/reward", "train/reward/exact_match", "train/kl",
                            "train/grad_norm"]  # fmt: skip
    assert [row["step"] for row in got] == ["0", "1", "2"]
    assert [row["eval/accuracy"] for row in got] == ["0.25", "", "0.5"]
    assert [row["train/reward"] for row in got] == ["", "1.0", "2.0"]
    assert math.isnan(float(got[2]["train/kl"])) and float(got[2]["train/grad_norm"]) == math.inf
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.csv"]


def test_a_resumed_table_drops_steps_to_come(tmp_path: Path, tell: Tell) -> None:
    tell(CsvTracker(CsvTrackerConfig(name="csv")), tmp_path, range(5))
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("2,0.5,cut o")
    tell(CsvTracker(CsvTrackerConfig(name="csv")), tmp_path, range(3, 6), first_step=3, course=10.0)
    got = rows(tmp_path / "metrics.csv")
    assert [(row["step"], row["train/reward"]) for row in got] == [
        ("0", ""), ("1", "1.0"), ("2", "2.0"), ("3", "30.0"), ("4", "40.0"), ("5", "50.0")
    ]  # fmt: skip
    tell(CsvTracker(CsvTrackerConfig(name="csv")), tmp_path, range(1))
    assert [row["step"] for row in rows(tmp_path / "metrics.csv")] == ["0"]


def test_names_with_commas_and_quotes(tmp_path: Path) -> None:
    tracker = CsvTracker(CsvTrackerConfig(name="csv"))
    tracker._path = tmp_path / "metrics.csv"
    tracker.metrics(1, {'a,b "c"': 1.5})
    tracker.metrics(2, {'a,b "c"': 2.5})
    assert rows(tmp_path / "metrics.csv") == [{"step": "1", 'a,b "c"': "1.5"}, {"step": "2", 'a,b "c"': "2.5"}]


def test_samples_as_parquet(tmp_path: Path, tell: Tell) -> None:
    tell(ParquetTracker(ParquetTrackerConfig(name="parquet")), tmp_path, range(3))
    folder = tmp_path / "samples"
    assert sorted(path.name for path in folder.iterdir()) == ["step-000000.parquet", "step-000002.parquet"]
    table = pyarrow.parquet.read_table(folder)
    assert [str(field.type) for field in table.schema] == ["int64", "string", "string", "string", "double", "bool",
                                                           "string"]  # fmt: skip
    first, second = table.to_pylist()[2:]
    assert first == {"step": 2, "prompt": "3|4=", "response": "4\nü", "answer": "4", "score": 1.0, "correct": True,
                     "data_source": "max"}  # fmt: skip
    assert math.isnan(second.pop("score"))
    assert second == {"step": 2, "prompt": "1,2=", "response": "?", "answer": '{"value": [2]}', "correct": None,
                      "data_source": None}  # fmt: skip
    metadata = pyarrow.parquet.ParquetFile(folder / "step-000002.parquet").metadata
    assert metadata.row_group(0).column(1).compression == "ZSTD"


@pytest.mark.parametrize(("first_step", "left"), [(3, [0, 2]), (1, [])])
def test_samples_of_steps_to_come_are_dropped(tmp_path: Path, tell: Tell, first_step: int, left: list[int]) -> None:
    tell(ParquetTracker(ParquetTrackerConfig(name="parquet")), tmp_path, range(5))
    (tmp_path / "samples" / "step-mine.parquet").touch()
    tell(ParquetTracker(ParquetTrackerConfig(name="parquet")), tmp_path, [], first_step=first_step)
    assert sorted(path.stem for path in (tmp_path / "samples").iterdir()) == [
        *(f"step-{step:06d}" for step in left), "step-mine"
    ]  # fmt: skip
