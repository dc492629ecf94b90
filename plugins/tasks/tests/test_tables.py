from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from drivetrain import UserError
from drivetrain_tasks.configs import CsvConfig, HuggingFaceConfig, ParquetConfig
from drivetrain_tasks.hub import HuggingFaceDataset
from drivetrain_tasks.tables import CsvDataset, ParquetDataset


def csv_file(folder: Path, text: str, **options: Any) -> CsvDataset:
    path = folder / "sums.csv"
    path.write_text(text, encoding="utf-8")
    return CsvDataset(CsvConfig(name="csv", path=path, **options))


def test_csv(tmp_path: Path) -> None:
    text = '\ufeffprompt,answer,level\n"1,\n+1",007,3\n2,x,4\n3,y,5\n'
    first, second = csv_file(tmp_path, text, limit=2)
    assert (first.prompt, first.answer, first.extra, first.data_source) == ("1,\n+1", "007", {"level": "3"}, "sums")
    assert second.prompt == "2"


def test_csv_pairs(tmp_path: Path) -> None:
    options = {"answer_key": None, "response_key": "y", "rejected_key": "n"}
    (example,) = csv_file(tmp_path, "prompt,y,n\n1+1,2,3\n", **options)
    assert (example.response, example.rejected, example.extra) == ("2", "3", {})


def test_csv_keys(tmp_path: Path) -> None:
    options = {"delimiter": ";", "prompt_key": "q", "answer_key": None, "response_key": "r", "data_source": "d"}
    (example,) = csv_file(tmp_path, "q;r\n1;2\n", **options)
    assert (example.prompt, example.answer, example.response, example.data_source) == ("1", None, "2", "d")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prompt,answer\n1,2\n3\n", "sums.csv:3"),
        ("prompt,answer\n1,2,3\n", "sums.csv:2"),
        ("prompt,x\n1,2\n", "no key 'answer'"),
        ('prompt,answer\n"1,2\n', "cannot read the data file"),
    ],
)
def test_a_bad_csv_line_is_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        csv_file(tmp_path, text)


CHAT = [{"role": "user", "content": "2+2"}]


def parquet_file(folder: Path, **columns: list[Any]) -> Path:
    path = folder / "train.parquet"
    parquet.write_table(pyarrow.table(columns), path)
    return path


def test_parquet(tmp_path: Path) -> None:
    path = parquet_file(tmp_path, prompt=[CHAT] * 3, reward=[{"truth": n} for n in (4, 5, 6)], level=[1, 2, 3])
    for place in (path, tmp_path):
        config = ParquetConfig(name="parquet", path=place, answer_key="reward.truth", limit=2)
        examples = ParquetDataset(config)
        assert [example.answer for example in examples] == ["4", "5"]
        assert examples[0].prompt == CHAT and examples[0].extra["level"] == 1


def test_a_bad_parquet_row_is_named(tmp_path: Path) -> None:
    path = parquet_file(tmp_path, prompt=["1", None], answer=["1", "2"])
    with pytest.raises(UserError, match=r"'prompt' is None.*\(.*train.parquet: row 1\)"):
        ParquetDataset(ParquetConfig(name="parquet", path=path))
    for name in ("none", "text"):
        (tmp_path / "text").write_text("no parquet")
        with pytest.raises(UserError, match="cannot read the data file"):
            ParquetDataset(ParquetConfig(name="parquet", path=tmp_path / name))


def test_huggingface_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"pip install 'drivetrain-tasks\[hub\]'"):
        HuggingFaceDataset(HuggingFaceConfig(name="huggingface", path="openai/gsm8k"))


class Rows(list[Any]):
    split: str | None = "train"

    def select(self, indices: range) -> Rows:
        return Rows(self[i] for i in indices)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The two functions of the package that are called, with their signatures."""
    module: Any = ModuleType("datasets")
    rows = Rows([{"question": "1", "answer": 1}, {"question": "2"}, {"question": "3", "answer": "3"}])

    def load_dataset(path: str, name: str | None = None, *, split: str) -> Rows:
        if (path, name, split) != ("openai/gsm8k", "main", "test"):
            raise ValueError(f"unknown {path} {name} {split}")
        return rows

    module.load_dataset = load_dataset
    module.load_from_disk = lambda path: {"test": rows} if path.endswith("dict") else rows
    monkeypatch.setitem(sys.modules, "datasets", module)
    return module


def hub(path: object, **options: Any) -> HuggingFaceDataset:
    given = {"name": "huggingface", "path": str(path), "prompt_key": "question"} | options
    return HuggingFaceDataset(HuggingFaceConfig(**given))


def test_huggingface_from_the_hub(stand_in: ModuleType) -> None:
    dataset = hub("openai/gsm8k", subset="main", split="test", limit=2)
    assert len(dataset) == 2 and dataset[0].answer == "1" and dataset[0].data_source == "gsm8k"
    with pytest.raises(UserError, match=r"no key 'answer' \(openai/gsm8k\[test\] row 1\)"):
        dataset[1]
    with pytest.raises(IndexError):
        dataset[2]
    with pytest.raises(UserError, match="cannot load the dataset: unknown openai/gsm8k None train"):
        hub("openai/gsm8k")


def test_huggingface_from_a_folder(stand_in: ModuleType, tmp_path: Path) -> None:
    for folder, mark in (("dict", "dataset_dict.json"), ("plain", "state.json")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / mark).write_text("{}")
    assert len(hub(tmp_path / "dict", split="test")) == 3
    assert len(hub(tmp_path / "plain")) == 3
    with pytest.raises(UserError, match="holds the split train"):
        hub(tmp_path / "plain", split="test")


def test_huggingface_with_the_package_itself(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_list([{"prompt": "1", "answer": 1}, {"prompt": "2", "answer": 2}])
    made.save_to_disk(tmp_path / "plain")
    datasets.DatasetDict({"test": made}).save_to_disk(tmp_path / "dict")
    (tmp_path / "raw").mkdir()
    made.to_json(tmp_path / "raw" / "train.jsonl")
    for folder, split in (("plain", "train"), ("dict", "test"), ("raw", "train")):
        config = HuggingFaceConfig(name="huggingface", path=str(tmp_path / folder), split=split, limit=1)
        dataset = HuggingFaceDataset(config)
        assert len(dataset) == 1 and dataset[0].answer == "1"
