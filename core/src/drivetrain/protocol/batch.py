"""The two sides of a DataProto, its tensor columns and its array columns, as checked mappings.

Both refuse, when it is set, a column whose number of rows is not the batch's and a name that the
other side has.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, MutableMapping
from typing import Any, TypeVar

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from drivetrain.protocol.handles import ColumnHandle
from drivetrain.protocol.rows import Array, Positions, take

Value = TypeVar("Value")


class RowCount:
    """How many rows a batch has: None until its first column, the same for all after."""

    def __init__(self) -> None:
        self.value: int | None = None
        self.said_by = ""


class Columns(MutableMapping[str, Value]):
    """What both sides share."""

    def __init__(self, rows: RowCount, elsewhere: Container[str] = ()) -> None:
        self._rows = rows
        self._elsewhere = elsewhere

    __eq__ = object.__eq__  # by value is DataProto.equal
    __hash__ = object.__hash__

    def _admit(self, name: str, shape: tuple[int, ...]) -> None:
        if name in self._elsewhere:
            raise ValueError(f"'{name}' cannot be both a tensor and a non-tensor column")
        if not shape:
            raise ValueError(f"column '{name}' is a scalar; its first dimension must be the rows")
        if self._rows.value is None:
            self._rows.value, self._rows.said_by = shape[0], name
        elif shape[0] != self._rows.value:
            like = f", as '{self._rows.said_by}'" if self._rows.said_by not in ("", name) else ""
            raise ValueError(f"column '{name}' has {shape[0]} rows; the batch has {self._rows.value}{like}")

    def _check(self, name: str) -> None:
        if name not in self:
            raise KeyError(f"no column '{name}'; there are {list(self)}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self)})"


class TensorColumns(Columns[Tensor]):
    """The tensor columns of a batch, `(rows, ...)` each; what `DataProto.batch` is.

    `columns["x"]` is a tensor: a column by reference is fetched, it alone, when it is looked at.
    `columns["x"] = value` takes a tensor or a handle. Real tensors lie in a `TensorDict`.
    """

    def __init__(self, rows: RowCount, elsewhere: Container[str] = ()) -> None:
        super().__init__(rows, elsewhere)
        self._tensors = TensorDict()
        self._handles: dict[str, ColumnHandle] = {}

    def __getitem__(self, name: str) -> Tensor:
        column = self.stored(name)
        return column.fetch() if isinstance(column, ColumnHandle) else column

    def __setitem__(self, name: str, value: Any) -> None:
        if not isinstance(value, Tensor | ColumnHandle):
            raise TypeError(f"tensor column '{name}' cannot be a {type(value).__name__}")
        self._admit(name, tuple(value.shape))
        if name in self:
            del self[name]
        if isinstance(value, ColumnHandle):
            self._handles[name] = value
        else:
            self._tensors.batch_size = self.batch_size
            self._tensors.set(name, value)

    def __delitem__(self, name: str) -> None:
        self._check(name)
        if self._handles.pop(name, None) is None:
            self._tensors.pop(name)

    def __contains__(self, name: object) -> bool:
        return name in self._handles or name in list(self._tensors.keys())

    def __iter__(self) -> Iterator[str]:
        return iter([*map(str, self._tensors.keys()), *self._handles])

    def __len__(self) -> int:
        return len(self._tensors.keys()) + len(self._handles)

    @property
    def batch_size(self) -> torch.Size:
        """`(rows,)`."""
        return torch.Size([self._rows.value or 0])

    def stored(self, name: str) -> Tensor | ColumnHandle:
        """The column as it is kept, a tensor or a handle; nothing is fetched. KeyError if none."""
        self._check(name)
        tensor: Tensor | None = self._tensors.get(name, None)
        return self._handles[name] if tensor is None else tensor

    def take(self, rows: Positions, into: TensorColumns) -> None:
        """Put these rows of every column into `into`, which is empty; views where a slice selects them."""
        taken = {name: take(self[name], rows) for name in self if name not in self._handles}
        into._tensors = TensorDict(taken, batch_size=[len(rows)])
        into._handles = {name: handle.select_rows(rows) for name, handle in self._handles.items()}

    def tensordict(self) -> TensorDict:
        """All columns as a new `TensorDict` of batch size `(rows,)`; fetches what is elsewhere."""
        return TensorDict({name: self[name] for name in self}, batch_size=self.batch_size)


class ArrayColumns(Columns[Array]):
    """The non-tensor columns, arrays `(rows, ...)`; what `DataProto.non_tensor_batch` is.

    Numeric and object arrays are kept as they are. A list or tuple becomes an object array with one
    element a row, whatever the elements; numpy's strings become objects. Else TypeError.
    """

    def __init__(self, rows: RowCount, elsewhere: Container[str] = ()) -> None:
        super().__init__(rows, elsewhere)
        self._arrays: dict[str, Array] = {}

    def __getitem__(self, name: str) -> Array:
        self._check(name)
        return self._arrays[name]

    def __setitem__(self, name: str, value: Any) -> None:
        if isinstance(value, list | tuple):
            elements, value = value, np.empty(len(value), dtype=object)
            for row, element in enumerate(elements):
                value[row] = element
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "biufcOUS":
            kind = getattr(value, "dtype", type(value).__name__)
            raise TypeError(f"column '{name}' cannot be {kind}; give a tensor, an array or a list")
        self._admit(name, value.shape)
        self._arrays[name] = value.astype(object) if value.dtype.kind in "US" else value

    def __delitem__(self, name: str) -> None:
        self._check(name)
        del self._arrays[name]

    def __contains__(self, name: object) -> bool:
        return name in self._arrays

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._arrays))

    def __len__(self) -> int:
        return len(self._arrays)
