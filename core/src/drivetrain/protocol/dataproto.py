"""DataProto: the batch that every part of a training step exchanges."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from drivetrain.protocol import saving
from drivetrain.protocol.batch import Columns, Stored, difference, fetched, join, merge_meta, same
from drivetrain.protocol.handles import ColumnHandle, take
from drivetrain.protocol.units import units

Names = Iterable[str] | None
Values = Mapping[str, Any] | None
Rows = int | slice | range | Tensor | np.ndarray[Any, Any] | Sequence[int] | Sequence[bool]


class DataProto:
    """Rows of tensors and of arrays, and a dict about all of them.

    `batch` maps names to tensors `(rows, ...)`, some perhaps still elsewhere (see `ColumnHandle`); `non_tensor_batch`
    maps names to numpy arrays `(rows, ...)`; `meta_info` is about the batch as a whole. Only `pop` and setting a column
    change the object itself. Columns are shared where torch can share them: replace a column, don't write into it.
    """

    def __init__(self, batch: Values = None, non_tensor_batch: Values = None, meta_info: Values = None) -> None:
        tensors: dict[str, Stored] = {}
        arrays: dict[str, Stored] = {}
        self.batch = Columns(tensors, arrays, Tensor | ColumnHandle)
        self.non_tensor_batch = Columns(arrays, tensors, np.ndarray)
        self.meta_info: dict[str, Any] = dict(meta_info or {})
        self.batch.update({} if batch is None else batch.items())
        self.non_tensor_batch.update(non_tensor_batch or {})

    @classmethod
    def from_single_dict(cls, data: Mapping[str, Any], meta_info: Values = None) -> DataProto:
        """Tensors and handles become `batch`; arrays, and lists of one element a row, `non_tensor_batch`."""
        new = cls(meta_info=meta_info)
        for name, column in data.items():
            (new.batch if isinstance(column, Tensor | ColumnHandle) else new.non_tensor_batch)[name] = column
        return new

    @classmethod
    def from_dict(cls, tensors: Values = None, non_tensors: Values = None, meta_info: Values = None) -> DataProto:
        """The constructor, under the name it has elsewhere."""
        return cls(tensors, non_tensors, meta_info)

    save = saving.save
    load = classmethod(saving.load)

    @property
    def stored(self) -> dict[str, Stored]:
        """All columns as they are kept, handles unfetched: tensors, then arrays."""
        return {**self.batch.data, **self.non_tensor_batch.data}

    def keys(self) -> list[str]:
        """Names of all columns."""
        return list(self.stored)

    def __len__(self) -> int:
        return next((column.shape[0] for column in self.stored.values()), 0)

    def __contains__(self, name: object) -> bool:
        return name in self.stored

    @overload
    def __getitem__(self, key: str) -> Any: ...
    @overload
    def __getitem__(self, key: Rows) -> DataProto: ...
    def __getitem__(self, key: str | Rows) -> Any:
        """A column by name, fetched if elsewhere; or rows by position (one row), slice, mask or positions."""
        if isinstance(key, str):
            return fetched(_pick(self.stored, key)[key])
        rows = np.atleast_1d(np.arange(len(self))[key.cpu().numpy() if isinstance(key, Tensor) else key])
        if rows.ndim > 1:
            raise IndexError(f"{key!r} is no index of rows")
        return self.from_single_dict({name: take(column, rows) for name, column in self.stored.items()}, self.meta_info)

    def __repr__(self) -> str:
        columns = [f"{name} {column.dtype} {tuple(column.shape)}" for name, column in self.stored.items()]
        return f"DataProto({len(self)} rows: {'; '.join(columns)}; meta_info {[*self.meta_info]})"

    def equal(self, other: DataProto) -> bool:
        """Whether columns, values (NaN equal to NaN), dtypes and meta_info are the same."""
        return same(self.stored, other.stored) and same(self.meta_info, other.meta_info)

    def select(
        self, batch_keys: Names = None, non_tensor_batch_keys: Names = None, meta_info_keys: Names = None
    ) -> DataProto:
        """Some of the columns and meta_info; None means all of that kind. KeyError if unknown."""
        columns = _pick(self.batch.data, batch_keys) | _pick(self.non_tensor_batch.data, non_tensor_batch_keys)
        return self.from_single_dict(columns, _pick(self.meta_info, meta_info_keys, "meta_info"))

    def pop(self, keys: Iterable[str] = (), meta_info_keys: Iterable[str] = ()) -> DataProto:
        """Take columns and meta_info out of this batch and return them. KeyError, and nothing taken, if unknown."""
        popped = self.from_single_dict(_pick(self.stored, keys), _pick(self.meta_info, meta_info_keys, "meta_info"))
        for name in popped.stored:
            del (self.batch if name in self.batch else self.non_tensor_batch)[name]
        for key in popped.meta_info:
            del self.meta_info[key]
        return popped

    def union(self, other: DataProto) -> DataProto:
        """The columns and meta_info of both; what both have must be equal, handles by identity.

        ValueError naming the column and the first row that differs, or the key of meta_info.
        """
        mine, theirs = self.stored, other.stored
        for name in mine:
            if name in theirs and not same(mine[name], theirs[name]):
                how = difference(mine[name], theirs[name])
                raise ValueError(f"column '{name}' differs between the two batches: {how}")
        new = {name: column for name, column in theirs.items() if name not in mine}
        return self.from_single_dict(mine | new, merge_meta([self.meta_info, other.meta_info]))

    def rename(self, names: Mapping[str, str]) -> DataProto:
        """Columns under new names, `{old: new}`. KeyError if unknown, ValueError if the new name is taken."""
        _pick(self.stored, names)
        renamed = {names.get(name, name): column for name, column in self.stored.items()}
        if len(renamed) < len(self.stored):
            raise ValueError(f"renaming {dict(names)} would give two of {self.keys()} one name")
        return self.from_single_dict(renamed, self.meta_info)

    def with_columns(self, **columns: Any) -> DataProto:
        """This batch with columns added or replaced; tensor, handle, array or list each."""
        return self.from_single_dict({**self.stored, **columns}, self.meta_info)

    def to(self, device: torch.device | str) -> DataProto:
        """Tensor columns on `device`; fetches what is elsewhere, so select first."""
        return self.with_columns(**{name: column.to(device) for name, column in self.batch.items()})

    def chunk(self, chunks: int) -> list[DataProto]:
        """Equal consecutive parts. ValueError if the rows don't divide: see pad_to_multiple."""
        if chunks < 1 or len(self) % chunks:
            raise ValueError(f"{len(self)} rows cannot be cut into {chunks} equal chunks; pad_to_multiple first")
        return [self[rows] for rows in np.split(np.arange(len(self)), chunks)]

    def split(self, rows: int) -> list[DataProto]:
        """Consecutive parts of `rows` rows; the last one may be shorter."""
        return [self[start : start + rows] for start in range(0, len(self), rows)]

    @staticmethod
    def concat(parts: Sequence[DataProto]) -> DataProto:
        """The rows of all parts in order. ValueError if columns, dtypes, shapes of rows or meta_info do not fit."""
        if not parts:
            raise ValueError("no batches to concatenate")
        names = {name: None for part in parts for name in part.stored}
        columns = {name: join(name, [part.stored.get(name) for part in parts]) for name in names}
        return DataProto.from_single_dict(columns, merge_meta([part.meta_info for part in parts]))

    def repeat(self, times: int, interleave: bool = True) -> DataProto:
        """Every row `times` times: `a a b b` interleaved, else `a b a b`."""
        rows = np.arange(len(self))
        return self[rows.repeat(times) if interleave else np.tile(rows, times)]

    def reorder(self, indices: Tensor | Sequence[int]) -> DataProto:
        """Row `indices[i]` at place `i`. ValueError unless every row is named exactly once."""
        if not torch.equal(torch.as_tensor(indices).cpu().sort().values, torch.arange(len(self))):
            raise ValueError(f"reorder needs each of {len(self)} rows once; to select rows, use batch[indices]")
        return self[indices]

    def pad_to_multiple(self, multiple: int) -> tuple[DataProto, int]:
        """A batch whose rows divide by `multiple`, and how many rows were added at its end.

        These repeat the first ones, so that a model can run on them, and count for nothing: `is_padding`, there only if
        rows were added, is True and `response_mask`, if there is one, zero. ValueError if padded already.
        """
        if multiple < 1:
            raise ValueError(f"cannot pad to a multiple of {multiple}")
        rows, added = len(self), -len(self) % multiple
        if added == 0:
            return self[:], 0
        if "is_padding" in self:
            raise ValueError("this batch is padded already; unpad it first")
        number = torch.arange(rows + added)
        padded = self[number % rows].with_columns(is_padding=number >= rows)
        if "response_mask" in self.batch:
            mask = padded["response_mask"]
            padded.batch["response_mask"] = torch.cat([mask[:rows], torch.zeros_like(mask[rows:])])
        return padded, added

    def unpad(self, pad_size: int) -> DataProto:
        """Without the last `pad_size` rows and `is_padding`; ValueError if that marks other rows."""
        kept = len(self) - pad_size
        last = [row >= kept for row in range(len(self))]
        if not 0 <= kept <= len(self) or ("is_padding" in self and self["is_padding"].tolist() != last):
            raise ValueError(f"the last {pad_size} of {len(self)} rows are not the padded ones")
        return self.select([name for name in self.batch if name != "is_padding"])[:kept]

    def select_uids(self, uids: Iterable[Any]) -> DataProto:
        """The rows whose `uid` is among `uids`, in this batch's order. KeyError if one has none."""
        wanted, own = set(uids), self["uid"].tolist()
        if unknown := wanted.difference(own):
            raise KeyError(f"no rows of uid {sorted(map(str, unknown))}")
        return self[[uid in wanted for uid in own]]

    def mini_batches(self, prompts: int, *, seed: int | None = None) -> Iterator[DataProto]:
        """Batches of `prompts` whole prompts (distinct `uid`); every row is in exactly one.

        Rows that share a `uid` or a `loss_group` stay together, in their order; prompts come in this batch's order, or
        shuffled by `seed`. ValueError at once if not every mini-batch can be full, or the batch is padded.
        """
        if "is_padding" in self:
            raise ValueError("padded rows would count as prompts: unpad before mini_batches")
        rows: dict[Hashable, list[int]] = {}
        for row, uid in enumerate(self["uid"].tolist()):
            rows.setdefault(uid, []).append(row)
        if prompts < 1 or len(rows) % prompts:
            raise ValueError(f"{len(rows)} prompts ({len(self)} rows) do not divide into mini-batches of {prompts}")
        prompt_of = {row: uid for uid, own in rows.items() for row in own}
        first = [rows[prompt_of[row]][0] for row in range(len(self))]
        tied = units(len(self), [first, *([self["loss_group"].tolist()] if "loss_group" in self else [])])
        parts = [list(dict.fromkeys(prompt_of[row] for row in unit)) for unit in tied]
        if seed is not None:
            order = torch.randperm(len(parts), generator=torch.Generator().manual_seed(seed))
            parts = [parts[place] for place in order.tolist()]
        batches: list[list[int]] = [[] for _ in range(len(rows) // prompts)]
        room = [prompts] * len(batches)
        for unit in sorted(parts, key=len, reverse=True):  # single prompts come last and fit wherever there is room
            batch = next((number for number, free in enumerate(room) if free >= len(unit)), None)
            if batch is None:
                what = f"a loss_group ties {len(unit)} prompts together: mini-batches of {prompts} prompts"
                raise ValueError(f"{what} cannot be filled from units of {sorted(set(map(len, parts)))} prompts")
            batches[batch] += sorted(row for uid in unit for row in rows[uid])
            room[batch] -= len(unit)
        return (self[batch] for batch in batches)


def _pick(known: dict[str, Any], names: Names, what: str = "column") -> dict[str, Any]:
    """The entries of these names, a string being one name and None all. KeyError if one is unknown."""
    names = list(known if names is None else [names] if isinstance(names, str) else names)
    if unknown := [name for name in names if name not in known]:
        raise KeyError(f"no {what} {unknown}; there are {list(known)}")
    return {name: known[name] for name in names}
