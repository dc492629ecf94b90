"""The columns of a batch, how two are compared and how parts are joined.

Values are compared with NaN equal to NaN; two handles by identity, fetching nothing; a handle and a tensor by value.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drivetrain.protocol.handles import ColumnHandle, RowView

if TYPE_CHECKING:
    from tensordict import TensorDict

Stored = Tensor | ColumnHandle | NDArray[Any]


class Columns(UserDict[str, Any]):
    """The tensors of a batch, handles among them, or its arrays; looking at a column fetches it, it alone."""

    def __init__(self, own: dict[str, Stored], beside: dict[str, Stored], kinds: Any) -> None:
        self.data, self._beside, self._kinds = own, beside, kinds

    def __getitem__(self, name: str) -> Any:
        if name not in self.data:
            raise KeyError(f"no column '{name}'; there are {list(self)}")
        return fetched(self.data[name])

    def __setitem__(self, name: str, value: Any) -> None:
        """TypeError or ValueError names a column of another kind or number of rows, or that is beside."""
        if isinstance(value, list | tuple) and self._kinds is np.ndarray:
            value = np.fromiter(value, dtype=object, count=len(value))
        if name in self._beside:
            raise ValueError(f"'{name}' cannot be both a tensor and a non-tensor column")
        if not isinstance(value, self._kinds):
            raise TypeError(f"column '{name}' cannot be a {type(value).__name__} here")
        if not value.shape:
            raise ValueError(f"column '{name}' is a scalar; its first dimension must be the rows")
        for other, column in {**self._beside, **self.data}.items():
            if other != name and column.shape[0] != value.shape[0]:
                rows = f"{value.shape[0]} rows; the batch has {column.shape[0]}, as '{other}'"
                raise ValueError(f"column '{name}' has {rows}")
        self.data[name] = value.astype(object) if isinstance(value, np.ndarray) and value.dtype.kind in "US" else value

    def tensordict(self) -> TensorDict:
        """These columns as a new `TensorDict` of batch size `(rows,)`; fetches what is elsewhere."""
        from tensordict import TensorDict  # takes seconds to import, and is not needed before

        return TensorDict(dict(self)).auto_batch_size_(1)


def fetched(column: Any) -> Any:
    """The tensor if it is a handle, anything else as it is."""
    return column.fetch() if isinstance(column, ColumnHandle) else column


def same(left: Any, right: Any) -> bool:
    """Whether two columns, or values of any kind, are equal, inside containers too."""
    if isinstance(left, ColumnHandle) and isinstance(right, ColumnHandle):
        return left.identity == right.identity
    left, right = fetched(left), fetched(right)
    if left is right:
        return True
    if isinstance(left, Tensor | np.ndarray) or isinstance(right, Tensor | np.ndarray):
        kind = Tensor if isinstance(left, Tensor) else np.ndarray
        alike = isinstance(left, kind) and isinstance(right, kind) and left.dtype == right.dtype
        if not alike or left.shape != right.shape:
            return False
        if left.dtype == object:
            return same(left.tolist(), right.tolist())
        right = right.to(left.device) if isinstance(right, Tensor) else right
        return bool(((left == right) | ((left != left) & (right != right))).all())
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple) and type(left) is type(right):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right) or bool(left != left and right != right)


def difference(left: Stored, right: Stored) -> str:
    """How two columns that are not the same differ, in words for an error."""
    if isinstance(left, ColumnHandle) and isinstance(right, ColumnHandle):
        return f"they refer to {left.identity} and {right.identity}"
    if str(left.dtype) != str(right.dtype) or tuple(left.shape) != tuple(right.shape):
        return f"{left.dtype} {tuple(left.shape)} is not {right.dtype} {tuple(right.shape)}"
    pairs = enumerate(zip(fetched(left), fetched(right)))
    return f"first at row {next(row for row, pair in pairs if not same(*pair))}"


def join(name: str, parts: Sequence[Stored | None]) -> Any:
    """One column after another; handles among tensors are fetched. ValueError if dtypes or shapes of rows differ."""
    if len(parts) == 1:
        return parts[0]
    kinds = ["missing" if part is None else f"{part.dtype} with rows of {tuple(part.shape[1:])}" for part in parts]
    for number, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise ValueError(f"column '{name}' is {kinds[0]} in part 0, {kind} in part {number}")
    handles = [part for part in parts if isinstance(part, ColumnHandle)]
    if len(handles) == len(parts):
        return RowView(handles, np.arange(sum(handle.shape[0] for handle in handles)))
    return (np.concatenate if isinstance(parts[0], np.ndarray) else torch.cat)([fetched(part) for part in parts])


def merge_meta(metas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """All keys of all dicts. ValueError naming the key if two have different values for it."""
    merged: dict[str, Any] = {}
    for key, value in (item for meta in metas for item in meta.items()):
        if not same(merged.setdefault(key, value), value):
            raise ValueError(f"meta_info '{key}' differs: {merged[key]!r} and {value!r}; reduce it or leave it out")
    return merged
