"""Dispatch of batches: rows spread over data-parallel ranks, padded or not, and put back in order."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, cast

import numpy as np
import torch

from drivetrain.builtin.balance import karmarkar_karp
from drivetrain.builtin.dispatch import MeshMode
from drivetrain.contracts.algorithm import LossTerm
from drivetrain.metrics import merge_metrics
from drivetrain.protocol import DataProto, units
from drivetrain.seam.registry import get_registry
from drivetrain.seam.specs import PolicyLossSpec


class DPComputeProto(MeshMode):
    """Each ``DataProto`` in parts over data-parallel indices, the results joined; other arguments to every rank.

    All batches of a call have the same rows, and are cut alike:

    - Rows of one ``loss_group`` stay together. Where there is an ``attention_mask``, the parts' tokens are balanced;
      otherwise parts are consecutive rows. Within a part rows keep their order.
    - Parts are made equal in rows by repeating the shortest row; then, and only then, ``is_padding`` marks these.
    - A method returns k rows for each row it got, those of one row together; the caller gets them in the order of its
      own rows, without padding. A method that returns nothing gives None.

    Only ``attention_mask`` and the labels are looked at; all other columns may stay where they lie.

    Attributes:
        together: columns whose equal labels keep rows in one part.
        equal: whether parts are padded to the same number of rows.
    """

    together: tuple[str, ...] = ("loss_group",)
    equal = True
    _given: list[list[int]] | None = None  # the rows of each part without padding; None if there is no batch
    _size, _marked = 0, False  # rows of each part with padding; whether is_padding was added

    def cut(self, arguments: Mapping[str, Any], parts: int) -> list[dict[str, Any]]:
        batches = {name: value for name, value in arguments.items() if isinstance(value, DataProto)}
        if not batches:
            return super().cut(arguments, parts)
        first, rows = next((name, len(batch)) for name, batch in batches.items())
        for name, batch in batches.items():
            if len(batch) != rows:
                raise ValueError(f"{name} has {len(batch)} rows, {first} has {rows}")
        mask = next((b["attention_mask"] for b in batches.values() if parts > 1 and "attention_mask" in b), None)
        lengths = [1] * rows if mask is None else mask.sum(dim=-1).tolist()
        labels = [b[name].tolist() for b in batches.values() for name in self.together if name in b and parts > 1]
        whole = units(rows, labels)
        if mask is None or parts == 1:
            starts = np.cumsum([0, *map(len, whole)])
            plan = [[u for u, start in enumerate(starts[:-1]) if start * parts // rows == p] for p in range(parts)]
        else:
            plan = _balanced(tuple(sum(lengths[row] for row in unit) for unit in whole), parts, self.equal)
        self._given = [sorted(row for unit in part for row in whole[unit]) for part in plan]
        self._size = max(map(len, self._given)) if self.equal else 0
        filler = min(range(rows), key=lengths.__getitem__, default=0)
        padded = any(len(part) < self._size for part in self._given)
        self._marked = padded and not any("is_padding" in batch for batch in batches.values())

        def take(batch: DataProto, part: list[int]) -> DataProto:
            taken = batch[np.array(part + [filler] * (self._size - len(part)), dtype=np.int64)]
            if not padded:
                return taken
            before = taken["is_padding"].bool() if "is_padding" in batch else torch.zeros(len(taken), dtype=torch.bool)
            return taken.with_columns(is_padding=before | (torch.arange(len(taken)) >= len(part)))

        return [
            {name: take(value, part) if name in batches else value for name, value in arguments.items()}
            for part in self._given
        ]

    def join(self, results: list[Any]) -> Any:
        if all(result is None for result in results):
            return None
        for number, result in enumerate(results):
            if not isinstance(result, DataProto):
                raise TypeError(f"a DataProto is to be returned; part {number} returned a {type(result).__name__}")
        joined = DataProto.concat(results)
        if self._given is None:
            return joined
        sizes = [max(len(part), self._size) for part in self._given]
        times = len(joined) // max(1, sum(sizes))
        found = [len(result) for result in results]
        if found != [times * size for size in sizes]:
            raise ValueError(f"each row must give as many rows as any other; parts of {sizes} rows gave {found}")
        starts = np.cumsum([0, *sizes])
        place = {row: start + at for start, part in zip(starts, self._given) for at, row in enumerate(part)}
        order = np.array([place[row] for row in range(len(place))], dtype=np.int64)
        whole = joined[(order[:, None] * times + np.arange(times)).ravel()]
        if self._marked:
            whole = whole.select([name for name in whole.batch if name != "is_padding"])
        return whole


class DPComputeProtoWithFunc(DPComputeProto):
    """As ``dp_compute_proto``; the first argument is a function, which goes to every rank."""

    def cut(self, arguments: Mapping[str, Any], parts: int) -> list[dict[str, Any]]:
        name, function = next(iter(arguments.items()), ("the first argument", None))
        if not callable(function):
            raise ValueError(f"{name} must be a function; it is a {type(function).__name__}")
        return super().cut(arguments, parts)


class DPComputeMetric(DPComputeProto):
    """Batches in parts over data-parallel indices, to learn from; the metrics that are returned are merged.

    As ``dp_compute_proto``, but nothing is ever padded: parts are uneven, and a rank may get no rows. Rows of one
    ``uid`` stay together too, unless the call has loss terms and none of them looks beyond a row.
    """

    equal = False

    def cut(self, arguments: Mapping[str, Any], parts: int) -> list[dict[str, Any]]:
        for name, value in arguments.items():
            if isinstance(value, DataProto) and "is_padding" in value:
                raise ValueError(f"{name} is padded, and padding must not reach a loss or a metric; unpad it first")
        lists = [value for value in arguments.values() if isinstance(value, list | tuple)]
        terms = [term for value in lists for term in value if isinstance(term, LossTerm)] if parts > 1 else []
        specs = [cast(PolicyLossSpec, get_registry().select("policy_losses", term.name).spec) for term in terms]
        if not terms or any(spec.scope not in ("token", "sequence") for spec in specs):
            self.together = ("loss_group", "uid")
        return super().cut(arguments, parts)

    def join(self, results: list[Any]) -> Any:
        return merge_metrics(results)


@lru_cache(maxsize=8)
def _balanced(weights: tuple[int, ...], parts: int, equal: bool) -> list[list[int]]:
    """The same for the same weights: most calls of a step have the same rows."""
    return karmarkar_karp(weights, parts, equal=equal)
