"""Typed metrics: a number that knows how it merges over micro-batches, ranks and steps.

A value is a Python number or a 0-d tensor. Tensors are detached and kept as they are, so that recording a metric never
waits for a device; `result` converts. This module imports nothing but the standard library.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, SupportsFloat

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Max", "Mean", "Metric", "Min", "Sum", "merge_metrics", "to_floats"]


@dataclass(frozen=True)
class Metric(ABC):
    """What `Sum`, `Mean`, `Max` and `Min` share."""

    def __post_init__(self) -> None:
        for field in fields(self):  # a metric must not keep an autograd graph alive
            detach = getattr(getattr(self, field.name), "detach", None)
            if detach is not None:
                object.__setattr__(self, field.name, detach())

    def merge(self, other: Metric) -> Self:
        """The metric of both parts together; TypeError if `other` is of another type."""
        if type(other) is not type(self):
            raise TypeError(f"cannot merge {type(self).__name__} with {type(other).__name__}")
        return self._merge(other)

    def settle(self) -> Self:
        """The same metric with Python floats, ready to be sent to another process; waits for the device."""
        return replace(self, **{field.name: float(getattr(self, field.name)) for field in fields(self)})

    @abstractmethod
    def result(self) -> float:
        """The metric as a Python float; waits for the device."""

    @abstractmethod
    def _merge(self, other: Self) -> Self: ...


@dataclass(frozen=True)
class Sum(Metric):
    """A total. A loss that is already divided by global counts is a Sum over its micro-batches."""

    value: SupportsFloat

    def result(self) -> float:
        return float(self.value)

    def _merge(self, other: Self) -> Self:
        return replace(self, value=_add(self.value, other.value))


@dataclass(frozen=True)
class Mean(Metric):
    """`total / count`, kept apart so that merging unequal parts is exact; a mean of nothing (count 0) is 0.0."""

    total: SupportsFloat
    count: SupportsFloat

    def result(self) -> float:
        count = float(self.count)
        return float(self.total) / count if count else 0.0

    def _merge(self, other: Self) -> Self:
        return replace(self, total=_add(self.total, other.total), count=_add(self.count, other.count))


@dataclass(frozen=True)
class Max(Metric):
    """The largest value seen; NaN wins, so that it is noticed."""

    value: SupportsFloat

    def result(self) -> float:
        return float(self.value)

    def _merge(self, other: Self) -> Self:
        return replace(self, value=_extreme(self.value, other.value, largest=True))


@dataclass(frozen=True)
class Min(Metric):
    """The smallest value seen; NaN wins, so that it is noticed."""

    value: SupportsFloat

    def result(self) -> float:
        return float(self.value)

    def _merge(self, other: Self) -> Self:
        return replace(self, value=_extreme(self.value, other.value, largest=False))


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


def _add(a: Any, b: Any) -> SupportsFloat:
    total: SupportsFloat = a + b
    return total


def _extreme(a: Any, b: Any, *, largest: bool) -> SupportsFloat:
    if not hasattr(a, "clamp"):
        a, b = b, a
    if hasattr(a, "clamp"):  # a tensor: compare on its device, without waiting for it
        bounded: SupportsFloat = a.clamp(min=b) if largest else a.clamp(max=b)
        return bounded
    chosen: SupportsFloat = a if a != a or (a > b if largest else a < b) else b
    return chosen
