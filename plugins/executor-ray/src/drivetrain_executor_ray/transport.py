"""How batches travel: tensors as arrays, large columns as references that are read where they are looked at."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import torch
from torch import Tensor

from drivetrain import ColumnHandle, DataProto
from drivetrain.metrics import Metric

_AS_INTEGERS = {torch.bfloat16: torch.int16}  # types that numpy does not know travel as integers of their size


@dataclass
class Moved:
    """Bytes that a process sent or read, and the seconds that it spent on that."""

    bytes: int = 0
    seconds: float = 0.0

    def add(self, count: int, seconds: float = 0.0) -> None:
        """Count a transfer."""
        self.bytes += count
        self.seconds += seconds

    def take(self) -> Moved:
        """What was counted since the last time."""
        taken = Moved(self.bytes, self.seconds)
        self.bytes, self.seconds = 0, 0.0
        return taken


MOVED = Moved()  # of this process


class RayColumn(ColumnHandle):
    """A tensor column in Ray's object store."""

    def __init__(self, tensor: Tensor) -> None:
        array = _array(tensor)
        start = time.perf_counter()
        self._ref = ray.put(array)
        MOVED.add(array.nbytes, time.perf_counter() - start)
        super().__init__(f"ray-{self._ref.hex()}", tensor.shape, tensor.dtype)

    def read(self) -> Tensor:
        return self._read(None)

    def read_rows(self, rows: Any) -> Tensor:
        return self._read(rows) if self._fetched is None else super().read_rows(rows)

    def _read(self, rows: Any) -> Tensor:
        start = time.perf_counter()
        array = ray.get(self._ref)
        array = array.copy() if rows is None else array[rows]  # an array in the store must not be written to
        MOVED.add(array.nbytes, time.perf_counter() - start)
        return _tensor(array, self.dtype)


@dataclass(frozen=True)
class _Packed:
    """A batch on its way."""

    columns: dict[str, Any]
    meta_info: dict[str, Any]


@dataclass(frozen=True)
class _PackedTensor:
    array: Any
    dtype: torch.dtype


def pack(value: Any, reference_bytes: float = float("inf")) -> Any:
    """What travels of an argument or a result; columns of a batch that are this large become references."""
    if isinstance(value, DataProto):
        packed: dict[str, Any] = {}
        for name, column in value.stored.items():
            if isinstance(column, Tensor):
                large = column.numel() * column.element_size() >= reference_bytes
                packed[name] = RayColumn(column) if large else _pack_tensor(column)
            else:
                packed[name] = column
        return _Packed(packed, value.meta_info)
    if isinstance(value, Tensor):
        return _pack_tensor(value)
    if isinstance(value, Metric):
        return value.settle()
    if isinstance(value, dict):
        return {name: pack(inner, reference_bytes) for name, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(pack(inner, reference_bytes) for inner in value)
    return value


def unpack(value: Any) -> Any:
    """What arrived."""
    if isinstance(value, _Packed):
        return DataProto.from_single_dict({name: unpack(column) for name, column in value.columns.items()},
                                          value.meta_info)  # fmt: skip
    if isinstance(value, _PackedTensor):
        array = value.array
        return _tensor(array if array.flags.writeable else array.copy(), value.dtype)
    if isinstance(value, dict):
        return {name: unpack(inner) for name, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(unpack(inner) for inner in value)
    return value


def referred(value: Any) -> Any:
    """An argument as every rank gets it whole: a batch with all its columns by reference."""
    if not isinstance(value, DataProto):
        return value
    return value.with_columns(**{name: RayColumn(column) for name, column in value.stored.items()
                                 if isinstance(column, Tensor)})  # fmt: skip


def mapped(change: Callable[[Any], Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Arguments, each changed."""
    return tuple(map(change, args)), {name: change(value) for name, value in kwargs.items()}


def _pack_tensor(tensor: Tensor) -> _PackedTensor:
    array = _array(tensor)
    MOVED.add(array.nbytes)
    return _PackedTensor(array, tensor.dtype)


def _array(tensor: Tensor) -> Any:
    tensor = tensor.detach().cpu().contiguous()
    return tensor.view(_AS_INTEGERS.get(tensor.dtype, tensor.dtype)).numpy()


def _tensor(array: Any, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).view(dtype)
