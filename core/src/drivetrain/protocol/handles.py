"""Columns by reference: a handle says where a column lies and is read only when somebody looks.

Selecting rows of a handle and joining handles make new handles and read nothing; `fetch` reads once
and remembers. Handles with one identity hold the same values; a column that was cut into chunks and
joined again has the identity it began with.

To keep columns somewhere else (a worker's memory, an object store), derive from `ColumnHandle` and
write `read`; write `read_rows` too if the store can hand out a part of a column.
"""

from __future__ import annotations

import hashlib
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from drivetrain.protocol.rows import AnyIndex, Positions, positions, take


class ColumnHandle(ABC):
    """A reference to one tensor column of `shape` `(rows, ...)` and `dtype`."""

    def __init__(self, identity: str, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.identity = identity
        self.shape = tuple(shape)
        self.dtype = dtype
        self._fetched: Tensor | None = None

    @property
    def rows(self) -> int:
        """How many rows the column has."""
        return self.shape[0]

    @abstractmethod
    def read(self) -> Tensor:
        """Read the tensor from where it lies; `fetch` calls this once at most."""

    def read_rows(self, rows: Positions) -> Tensor:
        """Read some rows; here, by fetching the whole column, which is then remembered."""
        return take(self.fetch(), rows)

    def fetch(self) -> Tensor:
        """The tensor. ValueError when what was read has not the announced shape and dtype."""
        if self._fetched is None:
            tensor = self.read()
            if tuple(tensor.shape) != self.shape or tensor.dtype != self.dtype:
                raise ValueError(
                    f"column {self.identity} was announced as {self.dtype} {self.shape}"
                    f" and read as {tensor.dtype} {tuple(tensor.shape)}"
                )
            self._fetched = tensor
        return self._fetched

    def select_rows(self, index: AnyIndex) -> ColumnHandle:
        """A handle to some of the rows; reads nothing."""
        rows = positions(index, self.rows)
        sources, which, source_rows = self.origin()
        return _view(sources, which[rows], source_rows[rows])

    def origin(self) -> tuple[Sequence[ColumnHandle], Positions, Positions]:
        """Where each row comes from: sources, the number of its source, its row there. Itself, unless it is a view."""
        return [self], np.zeros(self.rows, dtype=np.int64), np.arange(self.rows)

    def __getstate__(self) -> dict[str, Any]:
        """A handle travels to another process without the tensor it has read."""
        return {**self.__dict__, "_fetched": None}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.identity}, {self.dtype}, {self.shape})"


class LocalHandle(ColumnHandle):
    """A column in this process's memory, kept under its identity until `release`."""

    _store: ClassVar[dict[str, Tensor]] = {}

    @classmethod
    def put(cls, tensor: Tensor) -> LocalHandle:
        """Keep `tensor` (not copied) and return the handle to it."""
        handle = cls(f"local-{uuid.uuid4().hex}", tensor.shape, tensor.dtype)
        cls._store[handle.identity] = tensor
        return handle

    def read(self) -> Tensor:
        """The tensor kept. KeyError when it was released or is in another process."""
        if self.identity not in self._store:
            raise KeyError(f"column {self.identity} was released or is in another process")
        return self._store[self.identity]

    def release(self) -> None:
        """Forget the column; a handle that has fetched it stays valid."""
        self._store.pop(self.identity, None)


class RowView(ColumnHandle):
    """Rows of other handles in any order; made by `select_rows` and `concat_handles`.

    Row `i` is row `source_rows[i]` of `sources[which[i]]`. A view of views is a view of their sources, and only sources
    that rows come from are read.
    """

    def __init__(self, sources: Sequence[ColumnHandle], which: Positions, source_rows: Positions) -> None:
        names = " ".join(source.identity for source in sources)
        digest = hashlib.sha256(names.encode() + which.tobytes() + source_rows.tobytes()).hexdigest()[:32]
        first = sources[0]
        super().__init__(f"{first.identity}[{digest}]", (len(source_rows), *first.shape[1:]), first.dtype)
        self.sources, self.which, self.source_rows = tuple(sources), which, source_rows

    def origin(self) -> tuple[Sequence[ColumnHandle], Positions, Positions]:
        """The sources, not the view."""
        return self.sources, self.which, self.source_rows

    def read(self) -> Tensor:
        """The rows, through their sources."""
        if len(self.sources) == 1:
            return self.sources[0].read_rows(self.source_rows)
        places = [np.flatnonzero(self.which == number) for number in range(len(self.sources))]
        parts = [source.read_rows(self.source_rows[at]) for source, at in zip(self.sources, places, strict=True)]
        return take(torch.cat(parts), np.argsort(np.concatenate(places)))


def concat_handles(parts: Sequence[ColumnHandle]) -> ColumnHandle:
    """One or more handles, alike but for their rows, one after the other; reads nothing."""
    numbers: dict[str, int] = {}
    sources: list[ColumnHandle] = []
    which, source_rows = [], []
    for part in parts:
        part_sources, part_which, part_rows = part.origin()
        for source in part_sources:
            if numbers.setdefault(source.identity, len(sources)) == len(sources):
                sources.append(source)
        which.append(np.array([numbers[source.identity] for source in part_sources])[part_which])
        source_rows.append(part_rows)
    return _view(sources, np.concatenate(which), np.concatenate(source_rows))


def _view(sources: Sequence[ColumnHandle], which: Positions, source_rows: Positions) -> ColumnHandle:
    """The view in its one normal form, so that equal rows have equal identities; a source itself if it is all of it."""
    used, first_at = np.unique(which, return_index=True)
    used = used[np.argsort(first_at)] if len(used) else np.zeros(1, dtype=np.int64)
    number = np.zeros(len(sources), dtype=np.int64)
    number[used] = np.arange(len(used))
    sources = [sources[source] for source in used]
    if len(sources) == 1 and np.array_equal(source_rows, np.arange(sources[0].rows)):
        return sources[0]
    return RowView(sources, number[which], source_rows)
