"""Tensors in files of bounded size."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from drivetrain_backend_common import tensor_files

SIZES = {"a": 10, "b": 30, "large": 500, "c": 60, "d": 40, "empty": 0, "e": 1}  # floats


def test_files_are_bounded_and_hold_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_files, "FILE_BYTES", 400)
    given = {name: torch.randn(size) for name, size in SIZES.items()}
    where = tensor_files.write(given.items(), tmp_path, "part")
    read = {name: load_file(tmp_path / name) for name in dict.fromkeys(where.values())}
    assert {name: set(tensors) for name, tensors in read.items()} == {
        "part.safetensors": {"a", "b"}, "part-1.safetensors": {"large"}, "part-2.safetensors": {"c", "d", "empty"},
        "part-3.safetensors": {"e"},
    }  # fmt: skip
    assert set(read) == {path.name for path in tmp_path.iterdir()}
    assert all(read[where[name]][name].equal(tensor) for name, tensor in given.items())


def test_no_more_than_a_file_and_a_tensor_are_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_files, "FILE_BYTES", 400)
    memory: list[weakref.ref[np.ndarray]] = []  # of each tensor
    held = []

    def drawn() -> Iterator[tuple[str, Tensor]]:
        for number in range(40):
            array = np.full(20, number, dtype=np.float32)
            memory.append(weakref.ref(array))
            yield str(number), torch.from_numpy(array)
            del array
            held.append(sum(one() is not None for one in memory))

    tensor_files.write(drawn(), tmp_path, "part")
    assert len(list(tmp_path.iterdir())) == 8
    assert max(held) == 5


def test_nothing_is_a_file_too(tmp_path: Path) -> None:
    assert tensor_files.write((), tmp_path, "part") == {}
    assert load_file(tmp_path / "part.safetensors") == {}
