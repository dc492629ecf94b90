"""Typed metrics: a number that knows how it merges over micro-batches, ranks and steps.

A value is a Python number or a 0-d tensor. Tensors are detached and kept as they are, so that recording a metric never
waits for a device; `result` converts. This module imports nothing but the standard library.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, SupportsFloat

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Max", "Mean", "Metric", "Min", "Sum", "merge_metrics", "to_floats"]


@dataclass(frozen=True)
class Metric(ABC):
    """What `Sum`, `Mean`, `Max` and `Min` share; their fields merge by `_join`."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():  # a metric must not keep an autograd graph alive
            if hasattr(value, "detach"):
                object.__setattr__(self, name, value.detach())

    @staticmethod
    def _join(a: Any, b: Any) -> Any:
        return a + b

    def merge(self, other: Metric) -> Self:
        """The metric of both parts together; TypeError if `other` is of another type."""
        if type(other) is not type(self):
            raise TypeError(f"cannot merge {type(self).__name__} with {type(other).__name__}")
        return type(self)(*map(self._join, vars(self).values(), vars(other).values()))

    def settle(self) -> Self:
        """The same metric with Python floats, ready to be sent to another process; waits for the device."""
        return type(self)(*map(float, vars(self).values()))

    @abstractmethod
    def result(self) -> float:
        """The metric as a Python float; waits for the device."""


@dataclass(frozen=True)
class Mean(Metric):
    """`total / count`, kept apart so that merging unequal parts is exact; a mean of nothing (count 0) is 0.0."""

    total: SupportsFloat
    count: SupportsFloat

    def result(self) -> float:
        count = float(self.count)
        return float(self.total) / count if count else 0.0


@dataclass(frozen=True)
class _Single(Metric):
    value: SupportsFloat

    def result(self) -> float:
        return float(self.value)


class Sum(_Single):
    """A total. A loss that is already divided by global counts is a Sum over its micro-batches."""


class Max(_Single):
    """The largest value seen; NaN wins, so that it is noticed."""

    @staticmethod
    def _join(a: Any, b: Any) -> Any:
        a, b = (a, b) if hasattr(a, "clamp") else (b, a)
        if hasattr(a, "clamp"):  # a tensor: compare on its device, without waiting for it
            return a.clamp(min=b)
        return a if a != a or a > b else b


class Min(_Single):
    """The smallest value seen; NaN wins, so that it is noticed."""

    @staticmethod
    def _join(a: Any, b: Any) -> Any:
        return -Max._join(-a, -b)


def merge_metrics(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """One dict of all names, same names merged; TypeError naming the metric if one name has two types."""
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            try:
                merged[name] = merged[name].merge(metric) if name in merged else metric
            except TypeError as error:
                raise TypeError(f"metric {name!r}: {error}") from error
    return merged


def to_floats(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """`result()` of each metric by name."""
    return {name: metric.result() for name, metric in metrics.items()}
