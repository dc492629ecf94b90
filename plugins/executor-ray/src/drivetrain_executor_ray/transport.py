"""How batches travel: tensors as arrays, large columns as references that are read where they are looked at."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from drivetrain import ColumnHandle, DataProto
from drivetrain.metrics import Metric

_AS_INTEGERS = {torch.bfloat16: torch.int16}  # types that numpy does not know travel as integers of their size
SENT_BYTES = 1 << 16  # a column of the caller that is this large is an object of its own; others are within the call


@dataclass
class Moved:
    """Bytes that a process wrote to Ray and read from it, and the seconds that it spent on that."""

    bytes: int = 0
    seconds: float = 0.0
    _depth: int = 0

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add the seconds inside; what is timed within counts once."""
        start, self._depth = time.perf_counter(), self._depth + 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self.seconds += time.perf_counter() - start

    def take(self) -> Moved:
        """What was counted since the last time."""
        taken = Moved(self.bytes, self.seconds)
        self.bytes, self.seconds = 0, 0.0
        return taken


MOVED = Moved()  # of this process


class _ArrayColumn(ColumnHandle):
    """A tensor column that lies as an array in the object store."""

    def read(self) -> Tensor:
        return self._read(None)

    def read_rows(self, rows: Any) -> Tensor:
        return self._read(rows) if self._fetched is None else super().read_rows(rows)

    def _read(self, rows: Any) -> Tensor:
        with MOVED.timed():
            array = self.array()
            array = array.copy() if rows is None else array[rows]  # an array in the store must not be written to
            MOVED.bytes += array.nbytes
            return _tensor(array, self.dtype)

    @abstractmethod
    def array(self) -> Any:
        """The array, read-only."""


class RayColumn(_ArrayColumn):
    """A column that stays where it was made; whoever looks at it asks Ray for it."""

    def __init__(self, tensor: Tensor) -> None:
        self._ref = _put([tensor])
        super().__init__(f"ray-{self._ref.hex()}", tensor.shape, tensor.dtype)

    def array(self) -> Any:
        return ray.get(self._ref)[0]


class SentColumn(_ArrayColumn):
    """A column of the caller that comes along with a call, whole; a rank reads its rows if it looks at them.

    It travels as its place: the number of its object among those that come along, and its own number in that.
    """

    def __init__(self, tensor: Tensor, identity: str, place: tuple[int, int]) -> None:
        super().__init__(identity, tensor.shape, tensor.dtype)
        self._place, self._fetched = place, tensor
        self._given: Any = None

    def array(self) -> Any:
        return self._given

    def find(self, given: Sequence[Any]) -> None:
        """Take the array from the objects that came along."""
        number, within = self._place
        self._given = given[number][within]


class Sent:
    """Columns that were put into the object store for calls; each is put once, as long as it stays as it is."""

    def __init__(self) -> None:
        self._objects = WeakIdKeyDictionary()  # of a tensor: its version, an object, and its number in that

    def attach(self, value: Any, along: list[Any]) -> Any:
        """An argument with its large columns as :class:`SentColumn`; their objects are added to ``along``."""
        if not isinstance(value, DataProto):
            return value
        large = {name: column for name, column in value.stored.items()
                 if isinstance(column, Tensor) and column.numel() * column.element_size() >= SENT_BYTES}  # fmt: skip
        new = [column for column in large.values() if self._objects.get(column, (None,))[0] != _version(column)]
        if new:
            ref = _put(new)
            for within, column in enumerate(new):
                self._objects[column] = _version(column), ref, within
        sent = {}
        for name, column in large.items():
            _, ref, within = self._objects[column]
            if ref not in along:
                along.append(ref)
            sent[name] = SentColumn(column, f"ray-{ref.hex()}-{within}", (along.index(ref), within))
        return value.with_columns(**sent)


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


def unpack(value: Any, given: Sequence[Any] = ()) -> Any:
    """What arrived, with the objects that came along."""
    if isinstance(value, _Packed):
        for column in value.columns.values():
            _find(column, given)
        return DataProto.from_single_dict({name: unpack(column) for name, column in value.columns.items()},
                                          value.meta_info)  # fmt: skip
    if isinstance(value, _PackedTensor):
        array = value.array
        MOVED.bytes += array.nbytes
        return _tensor(array if array.flags.writeable else array.copy(), value.dtype)
    if isinstance(value, dict):
        return {name: unpack(inner, given) for name, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(unpack(inner, given) for inner in value)
    return value


def mapped(change: Callable[[Any], Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Arguments, each changed."""
    return tuple(map(change, args)), {name: change(value) for name, value in kwargs.items()}


def _pack_tensor(tensor: Tensor) -> _PackedTensor:
    array = _array(tensor)
    MOVED.bytes += array.nbytes
    return _PackedTensor(array, tensor.dtype)


def _put(tensors: Sequence[Tensor]) -> Any:
    with MOVED.timed():
        arrays = [_array(tensor) for tensor in tensors]
        MOVED.bytes += sum(array.nbytes for array in arrays)
        return ray.put(arrays)


def _version(tensor: Tensor) -> Any:
    """What changes when a tensor is written to; equal to nothing for one that does not count."""
    return object() if tensor.is_inference() else tensor._version


def _find(column: Any, given: Sequence[Any]) -> None:
    """Give the columns that came along, below a selection of rows, to where they are referred to."""
    if isinstance(column, SentColumn):
        column.find(given)
    for source in getattr(column, "sources", ()):
        _find(source, given)


def _array(tensor: Tensor) -> Any:
    tensor = tensor.detach().cpu().contiguous()
    return tensor.view(_AS_INTEGERS.get(tensor.dtype, tensor.dtype)).numpy()


def _tensor(array: Any, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).view(dtype)
