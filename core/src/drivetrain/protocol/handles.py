"""Columns by reference: a handle says where a column lies, and is read only when somebody looks.

Selecting rows of handles and joining them make new handles and read nothing. Handles of one identity hold the same
values. To keep columns elsewhere (a worker's memory, an object store) derive from `ColumnHandle`.
"""

from __future__ import annotations

import hashlib
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Positions = NDArray[np.int64]  # row numbers (rows,), none negative


class ColumnHandle(ABC):
    """A reference to one tensor column of `shape` `(rows, ...)` and `dtype`."""

    def __init__(self, identity: str, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.identity, self.shape, self.dtype = identity, tuple(shape), dtype
        self._fetched: Tensor | None = None

    @abstractmethod
    def read(self) -> Tensor:
        """Read the column from where it lies; `fetch` calls this once at most."""

    def read_rows(self, rows: Positions) -> Tensor:
        """Read some rows; here by fetching them all, to be replaced if the store can hand out a part."""
        part: Tensor = take(self.fetch(), rows)
        return part

    def fetch(self) -> Tensor:
        """The tensor, remembered. ValueError when it has not the announced shape and dtype."""
        if self._fetched is None:
            tensor = self.read()
            if (tuple(tensor.shape), tensor.dtype) != (self.shape, self.dtype):
                found = f"read as {tensor.dtype} {tuple(tensor.shape)}"
                raise ValueError(f"column {self.identity} was announced as {self.dtype} {self.shape} and {found}")
            self._fetched = tensor
        return self._fetched

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_fetched": None}  # it travels without what it has read


class LocalHandle(ColumnHandle):
    """A tensor at hand, behind the interface of a handle; the tensor travels with it."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(f"local-{uuid.uuid4().hex}", tensor.shape, tensor.dtype)
        self._tensor = tensor

    def read(self) -> Tensor:
        return self._tensor


class RowView(ColumnHandle):
    """Rows of handles, alike but for their rows: row `i` is row `rows[i]` of all `sources` joined."""

    def __init__(self, sources: Sequence[ColumnHandle], rows: Positions) -> None:
        names = " ".join(source.identity for source in sources)
        digest = hashlib.sha256(names.encode() + rows.tobytes()).hexdigest()[:32]
        super().__init__(f"rows-{digest}", (len(rows), *sources[0].shape[1:]), sources[0].dtype)
        self.sources, self.rows = sources, rows

    def read(self) -> Tensor:
        if len(self.rows) == 0:
            return torch.empty(self.shape, dtype=self.dtype)
        starts = np.cumsum([0, *(source.shape[0] for source in self.sources)])
        which = np.searchsorted(starts, self.rows, side="right") - 1  # the number of each row's source
        places = {int(number): np.flatnonzero(which == number) for number in np.unique(which)}  # no other is read
        parts: list[Tensor] = [
            self.sources[number].read_rows(self.rows[at] - starts[number]) for number, at in places.items()
        ]
        if len(parts) == 1:
            return parts[0]
        joined: Tensor = take(torch.cat(parts), np.argsort(np.concatenate(list(places.values()))))
        return joined


def take(column: Any, rows: Positions) -> Any:
    """These rows of a tensor, array or handle; of a tensor or array a view if they are evenly spaced and ascending."""
    if np.array_equal(rows, np.arange(column.shape[0])):
        return column
    if isinstance(column, ColumnHandle):
        return RowView(column.sources, column.rows[rows]) if isinstance(column, RowView) else RowView([column], rows)
    steps = np.diff(rows)
    if len(rows) and (steps > 0).all() and (steps == steps[:1]).all():
        return column[rows[0] : rows[-1] + 1 : steps[0] if len(steps) else 1]
    return column[torch.from_numpy(rows.copy()).to(column.device) if isinstance(column, Tensor) else rows]
