"""DataProto: the batch that every part of a training step exchanges.

    batch = DataProto.from_single_dict(batch_dict)
    gen = batch.pop(["input_ids", "attention_mask"])
    batch = batch.union(generate(gen))
    batch.batch["token_level_scores"] = reward_fn(batch)

Only `pop` and setting a column change the object itself; every other method returns a new one. Columns are shared, not
copied, where torch can share them: replace a column, don't write into it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, overload

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from drivetrain.protocol import mini_batch, padding, saving
from drivetrain.protocol.batch import ArrayColumns, RowCount, TensorColumns
from drivetrain.protocol.handles import ColumnHandle
from drivetrain.protocol.merging import Column, concat_columns, difference, merge_meta, same_value
from drivetrain.protocol.rows import AnyIndex, as_slice, positions

Tensors = Mapping[str, Tensor | ColumnHandle] | TensorDict


class DataProto:
    """Rows of tensors and of arrays, and a dict about all of them.

    `batch` maps names to tensors `(rows, ...)`, some perhaps still elsewhere (see `ColumnHandle`); `non_tensor_batch`
    maps names to numpy arrays `(rows, ...)`, numeric or of objects; `meta_info` is about the batch as a whole. A name
    is a tensor column or a non-tensor column, never both.
    """

    def __init__(
        self,
        batch: Tensors | None = None,
        non_tensor_batch: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> None:
        """Raises ValueError naming a column with another number of rows, TypeError for one of another type."""
        self._rows = RowCount()
        self.batch = TensorColumns(self._rows)
        self.non_tensor_batch = ArrayColumns(self._rows, elsewhere=self.batch)
        self.batch._elsewhere = self.non_tensor_batch
        self.meta_info: dict[str, Any] = dict(meta_info or {})
        for name, column in () if batch is None else batch.items():
            self.batch[name] = column
        self.non_tensor_batch.update(non_tensor_batch or {})

    @classmethod
    def from_single_dict(cls, data: Mapping[str, Any], meta_info: Mapping[str, Any] | None = None) -> DataProto:
        """Tensors and handles become `batch`; arrays, and lists of one element a row, `non_tensor_batch`."""
        return cls(meta_info=meta_info)._put(data)

    @classmethod
    def from_dict(
        cls,
        tensors: Tensors | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> DataProto:
        """The constructor, under the name it has elsewhere."""
        return cls(tensors, non_tensors, meta_info)

    def __len__(self) -> int:
        """The number of rows; 0 while there has been no column."""
        return self._rows.value or 0

    def __contains__(self, name: object) -> bool:
        return name in self.batch or name in self.non_tensor_batch

    def keys(self) -> list[str]:
        """Names of all columns: tensors, then non-tensors."""
        return [*self.batch, *self.non_tensor_batch]

    @overload
    def __getitem__(self, key: str) -> Any: ...
    @overload
    def __getitem__(self, key: AnyIndex) -> DataProto: ...
    def __getitem__(self, key: str | AnyIndex) -> Any:
        """A column by name, fetched if elsewhere; or rows by position (one row), slice, mask or positions.

        Raises KeyError or IndexError.
        """
        if isinstance(key, str):
            self._check(key, self.keys())
            return self.batch[key] if key in self.batch else self.non_tensor_batch[key]
        rows = positions(key, len(self))
        view = as_slice(rows)
        new = DataProto(meta_info=self.meta_info)
        new._rows.value = None if self._rows.value is None else len(rows)
        self.batch.take(rows, into=new.batch)
        return new._put({k: array[rows if view is None else view] for k, array in self.non_tensor_batch.items()})

    def equal(self, other: DataProto) -> bool:
        """Whether rows, columns, values (NaN equal to NaN), dtypes and meta_info are the same."""
        mine, theirs = self._columns(), other._columns()
        if len(self) != len(other) or mine.keys() != theirs.keys() or not same_value(self.meta_info, other.meta_info):
            return False
        return all(difference(column, theirs[key]) is None for key, column in mine.items())

    def __repr__(self) -> str:
        columns = [f"{key} {column.dtype} {tuple(column.shape)}" for key, column in self._columns().items()]
        return f"DataProto({len(self)} rows: {'; '.join(columns)}; meta_info {[*self.meta_info]})"

    def select(
        self,
        batch_keys: Iterable[str] | None = None,
        non_tensor_batch_keys: Iterable[str] | None = None,
        meta_info_keys: Iterable[str] | None = None,
    ) -> DataProto:
        """Some of the columns and meta_info; None means all of that kind. KeyError if unknown."""
        tensors = self._check(batch_keys, self.batch)
        arrays = self._check(non_tensor_batch_keys, self.non_tensor_batch)
        meta = self._check(meta_info_keys, self.meta_info, "meta_info")
        return self._with([*tensors, *arrays], {key: self.meta_info[key] for key in meta})

    def pop(self, keys: Iterable[str] = (), meta_info_keys: Iterable[str] = ()) -> DataProto:
        """Take columns, tensors or not, and meta_info out of this batch and return them. KeyError, nothing removed, if
        one is unknown."""
        keys, meta = self._check(keys, self.keys()), self._check(meta_info_keys, self.meta_info, "meta_info")
        popped = self._with(keys, {key: self.meta_info[key] for key in meta})
        for key in keys:
            del (self.batch if key in self.batch else self.non_tensor_batch)[key]
        for key in meta:
            del self.meta_info[key]
        return popped

    def union(self, other: DataProto) -> DataProto:
        """The columns and meta_info of both; what both have must be equal, NaN equal to NaN.

        Columns by reference are equal if their identities are, and stay where they lie. Raises ValueError naming the
        column and the first row that differs, or the meta_info key.
        """
        mine, theirs = self._columns(), other._columns()
        for key, column in mine.items():
            if key in theirs and (why := difference(column, theirs[key])):
                raise ValueError(f"column '{key}' differs between the two batches: {why}")
        merged = self._with(mine, merge_meta([self.meta_info, other.meta_info]))
        return merged._put({key: column for key, column in theirs.items() if key not in mine})

    def rename(self, names: Mapping[str, str]) -> DataProto:
        """Columns under new names, `{old: new}`. KeyError if unknown, ValueError if the new name is taken."""
        self._check(names, self.keys())
        renamed = {names.get(key, key): column for key, column in self._columns().items()}
        if len(renamed) < len(self.keys()):
            raise ValueError(f"renaming {dict(names)} would give two of {self.keys()} one name")
        return self._with([], self.meta_info)._put(renamed)

    def with_columns(self, **columns: Any) -> DataProto:
        """This batch with columns added or replaced; tensor, handle, array or list each."""
        return self._with([key for key in self.keys() if key not in columns], self.meta_info)._put(columns)

    def to(self, device: torch.device | str) -> DataProto:
        """Tensor columns on `device`; fetches what is elsewhere, so select first."""
        return self.with_columns(**self.batch.tensordict().to(device))

    def chunk(self, chunks: int) -> list[DataProto]:
        """Equal consecutive parts. ValueError if the rows don't divide: see pad_to_multiple."""
        if chunks < 1 or len(self) % chunks:
            raise ValueError(f"{len(self)} rows cannot be cut into {chunks} equal chunks; pad_to_multiple first")
        size = len(self) // chunks
        return [self[part * size : (part + 1) * size] for part in range(chunks)]

    def split(self, rows: int) -> list[DataProto]:
        """Consecutive parts of `rows` rows; the last one may be shorter."""
        if rows < 1:
            raise ValueError(f"cannot split into parts of {rows} rows")
        return [self[start : start + rows] for start in range(0, len(self), rows)]

    @staticmethod
    def concat(parts: Sequence[DataProto]) -> DataProto:
        """The rows of all parts in order. Columns that are by reference in every part stay so.

        Raises ValueError when there are no parts, a column is missing in one or of another dtype or shape after the
        rows, or meta_info of one key differs.
        """
        if not parts:
            raise ValueError("no batches to concatenate")
        for number, part in enumerate(parts):
            if odd := set(part.keys()) ^ set(parts[0].keys()):
                raise ValueError(f"parts 0 and {number} do not both have the columns {sorted(odd)}")
        joined = DataProto(meta_info=merge_meta([part.meta_info for part in parts]))
        joined._rows.value = sum(map(len, parts))
        columns = [part._columns() for part in parts]
        return joined._put({key: concat_columns(key, [part[key] for part in columns]) for key in columns[0]})

    def repeat(self, times: int, interleave: bool = True) -> DataProto:
        """Every row `times` times: `a a b b` interleaved, else `a b a b`."""
        rows = np.arange(len(self))
        return self[rows.repeat(times) if interleave else np.tile(rows, times)]

    def reorder(self, indices: Tensor | Sequence[int]) -> DataProto:
        """Row `indices[i]` at place `i`. ValueError unless every row is named exactly once."""
        rows = positions(indices, len(self))
        if not np.array_equal(np.sort(rows), np.arange(len(self))):
            raise ValueError(f"reorder needs each of {len(self)} rows once; to select rows, use batch[indices]")
        return self[rows]

    def pad_to_multiple(self, multiple: int) -> tuple[DataProto, int]:
        """A batch whose rows divide by `multiple`, and how many rows were added at its end.

        Added rows repeat the first ones and count for nothing: `is_padding` is True there and `response_mask`, if there
        is one, zero. With none to add there is no `is_padding`. ValueError if the batch is padded already.
        """
        return padding.pad_to_multiple(self, multiple)

    def unpad(self, pad_size: int) -> DataProto:
        """Without the last `pad_size` rows and without `is_padding`; for what came back for a padded batch too.

        ValueError if `is_padding` marks other rows.
        """
        return padding.unpad(self, pad_size)

    def select_uids(self, uids: Iterable[Any]) -> DataProto:
        """The rows whose `uid` is among `uids`, in this batch's order. KeyError if one has none."""
        wanted, own = set(uids), self["uid"].tolist()
        if unknown := wanted.difference(own):
            raise KeyError(f"no rows of uid {sorted(map(str, unknown))}")
        return self[np.array([uid in wanted for uid in own], dtype=bool)]

    def mini_batches(
        self, prompts: int, *, generator: torch.Generator | None = None, seed: int | None = None
    ) -> Iterator[DataProto]:
        """Batches of `prompts` whole prompts (distinct `uid`); every row is in exactly one.

        Rows that share a `uid` or a `loss_group` stay together, in their order; prompts come in this batch's order, or
        shuffled by `generator` or `seed`. Raises at once ValueError, with the arithmetic, unless every mini-batch is
        full, or if the batch is padded; KeyError without `uid`.
        """
        if padding.PADDING_COLUMN in self:
            raise ValueError("padded rows would count as prompts: unpad before mini_batches")
        if generator is not None and seed is not None:
            raise ValueError("mini_batches takes a generator or a seed, not both")
        if seed is not None:
            generator = torch.Generator().manual_seed(seed)
        groups = self["loss_group"].tolist() if "loss_group" in self else None
        plan = mini_batch.plan(self["uid"].tolist(), groups, prompts, generator)
        return (self[rows] for rows in plan)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write safetensors and JSON to `folder`, whole or not at all; see `saving.save` for what it raises."""
        saving.save(self, folder)

    @staticmethod
    def load(folder: str | os.PathLike[str], device: str = "cpu") -> DataProto:
        """Read what `save` wrote, tensor columns onto `device`."""
        return saving.load(folder, device)

    def _columns(self) -> dict[str, Column]:
        """All columns as they are kept; nothing is fetched."""
        return {**{key: self.batch.stored(key) for key in self.batch}, **self.non_tensor_batch}

    def _put(self, columns: Mapping[str, Any]) -> DataProto:
        for name, column in columns.items():
            if isinstance(column, Tensor | ColumnHandle):
                self.batch[name] = column
            else:
                self.non_tensor_batch[name] = column
        return self

    def _with(self, keys: Iterable[str], meta_info: Mapping[str, Any]) -> DataProto:
        """A new batch of as many rows with some columns of this one; nothing is copied."""
        new, columns = DataProto(meta_info=meta_info), self._columns()
        new._rows.value, new._rows.said_by = self._rows.value, self._rows.said_by
        return new._put({key: columns[key] for key in keys})

    def _check(self, names: Iterable[str] | None, known: Iterable[str], what: str = "column") -> list[str]:
        """`names` as a list (all for None, one for a string), each once. KeyError if one is unknown."""
        known = list(known)
        names = known if names is None else [names] if isinstance(names, str) else list(dict.fromkeys(names))
        if unknown := [name for name in names if name not in known]:
            raise KeyError(f"no {what} {unknown}; there are {known}")
        return names
