"""Putting columns and meta_info of batches together: when two are the same, and what fits.

Values are compared with NaN equal to NaN; two handles by identity, fetching nothing; a handle and a
tensor by value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drivetrain.protocol.handles import ColumnHandle, concat_handles
from drivetrain.protocol.rows import Array

Column = Tensor | ColumnHandle | Array


def difference(left: Column, right: Column) -> str | None:
    """How two columns differ, in words for an error; None if they are the same."""
    if left is right:
        return None
    if isinstance(left, ColumnHandle) and isinstance(right, ColumnHandle):
        same = left.identity == right.identity
        return None if same else f"they refer to {left.identity} and {right.identity}"
    if left.dtype != right.dtype or tuple(left.shape) != tuple(right.shape):
        return f"{left.dtype} {tuple(left.shape)} is not {right.dtype} {tuple(right.shape)}"
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray) and left.dtype == object:
        pairs = enumerate(zip(left, right, strict=True))
        row = next((row for row, (one, two) in pairs if not same_value(one, two)), None)
    else:
        row = _different_row(_fetched(left), _fetched(right))
    return None if row is None else f"first at row {row}"


def same_value(left: Any, right: Any) -> bool:
    """Whether two values of any kind are equal, inside containers too."""
    if left is right:
        return True
    if isinstance(left, Tensor | np.ndarray) or isinstance(right, Tensor | np.ndarray):
        if type(left) is not type(right) or left.dtype != right.dtype or left.shape != right.shape:
            return False
        if left.dtype == object:
            return same_value(left.tolist(), right.tolist())
        return _different_row(_fetched(left)[None], _fetched(right)[None]) is None
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(same_value(left[k], right[k]) for k in left)
    if isinstance(left, list | tuple) and type(left) is type(right):
        return len(left) == len(right) and all(map(same_value, left, right))
    return bool(left == right) or bool(left != left and right != right)


def concat_columns(name: str, parts: Sequence[Column]) -> Column:
    """One column after another: handles give a handle; handles among tensors are fetched.

    Raises ValueError when dtypes, shapes after the rows or kinds differ.
    """
    kinds = [f"{part.dtype} with rows of {tuple(part.shape[1:])}" for part in parts]
    for number, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise ValueError(f"column '{name}' is {kinds[0]} in part 0, {kind} in part {number}")
    if len(parts) == 1:
        return parts[0]
    arrays = [part for part in parts if isinstance(part, np.ndarray)]
    handles = [part for part in parts if isinstance(part, ColumnHandle)]
    if arrays:
        return np.concatenate(arrays)
    if len(handles) == len(parts):
        return concat_handles(handles)
    return torch.cat([_fetched(part) for part in parts])


def merge_meta(metas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """All keys of all dicts. ValueError naming the key if two have different values for it."""
    merged: dict[str, Any] = {}
    for meta in metas:
        for key, value in meta.items():
            if not same_value(merged.setdefault(key, value), value):
                raise ValueError(
                    f"meta_info '{key}' differs: {merged[key]!r} and {value!r}; reduce it or leave it out first"
                )
    return merged


def _fetched(column: Column) -> Tensor:
    """The tensor of a column; a numeric array as a tensor."""
    if isinstance(column, np.ndarray):
        return torch.from_numpy(column.copy())
    return column.fetch() if isinstance(column, ColumnHandle) else column


def _different_row(left: Tensor, right: Tensor) -> int | None:
    right = right.to(left.device)
    if torch.equal(left, right):  # one pass and no memory: the usual case
        return None
    different = (left != right) & ~((left != left) & (right != right))
    rows = different.reshape(len(left), -1).any(dim=1).nonzero()
    return int(rows[0]) if len(rows) else None
