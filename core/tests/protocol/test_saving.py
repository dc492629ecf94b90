"""Save and load: whole or not at all, never pickle, and errors that name the place."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from drivetrain.protocol import DataProto, LocalHandle, saving


def full_batch() -> DataProto:
    base = torch.arange(12.0).view(3, 4)
    return DataProto.from_single_dict(
        {
            "bf16": base.bfloat16(),
            "bool": base > 5,
            "double": torch.tensor([float("nan"), float("inf"), 0.1], dtype=torch.float64),
            "shared": base,
            "alias": base,
            "transposed": torch.arange(12).view(4, 3).T,
            "handle": LocalHandle(torch.ones(3, 2)),
            "empty": torch.zeros(3, 0),
            "numbers": np.arange(6, dtype=np.float64).reshape(3, 2)[:, ::-1],
            "flags": np.array([True, False, True]),
            "objects": ["ü \ud800", None, {"messages": [{"role": "user", "n": 0.1}], "nan": float("nan")}],
        },
        {"temperature": 1.0, "list": [1, "a", None]},
    )


def test_round_trip(tmp_path):
    batch = full_batch()
    batch.save(tmp_path / "a" / "batch")
    loaded = DataProto.load(tmp_path / "a" / "batch")
    assert loaded.equal(batch.to("cpu")) and loaded.keys() == [*batch.batch, *batch.non_tensor_batch]
    assert sorted(file.name for file in (tmp_path / "a").rglob("*")) == ["batch", "columns.json", "columns.safetensors"]


def test_a_batch_without_columns(tmp_path):
    DataProto(meta_info={"a": 1}).save(tmp_path / "b")
    assert DataProto.load(tmp_path / "b").meta_info == {"a": 1}


@pytest.mark.parametrize(
    "value", [{1, 2}, (1, 2), {1: "a"}, [np.float32(1)], np.arange(2), b"bytes", [{"a": object()}]]
)
def test_what_json_would_not_give_back_is_named(tmp_path, value):
    with pytest.raises(TypeError, match="column 'odd', row 1 cannot be saved"):
        DataProto.from_single_dict({"odd": ["fine", value]}).save(tmp_path / "b")
    with pytest.raises(TypeError, match="meta_info 'odd' cannot be saved"):
        DataProto(meta_info={"odd": value}).save(tmp_path / "b")
    assert list(tmp_path.iterdir()) == []


def test_replaces_an_older_one_and_nothing_else(tmp_path):
    DataProto({"x": torch.zeros(2)}).save(tmp_path / "b")
    DataProto({"y": torch.ones(3)}).save(tmp_path / "b")
    assert DataProto.load(tmp_path / "b").keys() == ["y"] and len(list(tmp_path.iterdir())) == 1
    (tmp_path / "empty").mkdir()
    DataProto({"y": torch.ones(3)}).save(tmp_path / "empty")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with pytest.raises(FileExistsError, match="no saved DataProto"):
        full_batch().save(tmp_path / "mine")
    with pytest.raises(FileExistsError, match="no saved DataProto"):
        full_batch().save(tmp_path / "mine" / "notes.txt")
    assert (tmp_path / "mine" / "notes.txt").read_text() == "keep"


def test_a_failed_save_leaves_the_older_one(tmp_path, monkeypatch):
    DataProto({"x": torch.zeros(2)}).save(tmp_path / "b")

    def full_disk(*_):
        raise OSError("disk full")

    monkeypatch.setattr(saving, "save_file", full_disk)
    with pytest.raises(OSError, match="disk full"):
        full_batch().save(tmp_path / "b")
    assert DataProto.load(tmp_path / "b").keys() == ["x"] and len(list(tmp_path.iterdir())) == 1


def test_another_format_is_refused(tmp_path):
    full_batch().save(tmp_path / "b")
    description = json.loads((tmp_path / "b" / "columns.json").read_text())
    (tmp_path / "b" / "columns.json").write_text(json.dumps({**description, "format": 99}))
    with pytest.raises(ValueError, match="format 99; this reads 1"):
        DataProto.load(tmp_path / "b")
