"""Which rows: every way of naming rows of a batch becomes one array of positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]
Positions = NDArray[np.int64]
"""Row numbers `(rows,)`, none negative."""

AnyIndex = int | slice | range | Tensor | Array | Sequence[int] | Sequence[bool]
"""What a caller may write: a position, a slice, a boolean mask `(rows,)` or positions."""


def positions(index: AnyIndex, rows: int) -> Positions:
    """The row numbers that `index` names in a column of `rows` rows; negative from the end.

    Raises IndexError for a row out of range, a mask of another length or what is no index.
    """
    if isinstance(index, Tensor):
        index = index.cpu().numpy()
    elif isinstance(index, range | tuple):
        index = list(index)
    named: Positions = np.arange(rows)[index]
    if named.ndim > 1:
        raise IndexError(f"{index!r} is no index of rows")
    return np.ascontiguousarray(np.atleast_1d(named))


def as_slice(rows: Positions) -> slice | None:
    """The slice that selects these rows if they are evenly spaced and ascending, else None."""
    if len(rows) < 2:
        return slice(rows[0], rows[0] + 1) if len(rows) else slice(0, 0)
    steps = np.diff(rows)
    even = steps[0] > 0 and (steps == steps[0]).all()
    return slice(rows[0], rows[-1] + 1, steps[0]) if even else None


def take(column: Tensor, rows: Positions) -> Tensor:
    """These rows of `column`: a view if a slice selects them, a copy otherwise."""
    view = as_slice(rows)
    if view is not None:
        return column[view]
    return column.index_select(0, torch.from_numpy(rows).to(column.device))
