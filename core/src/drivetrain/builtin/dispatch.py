"""Dispatch over a mesh of ranks, and the modes that do not look at rows of a batch."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

from drivetrain.contracts.mesh import Call, DispatchMode, RankLayout
from drivetrain.protocol import DataProto

AXES = ("dp", "pp", "cp", "tp")


class MeshMode(DispatchMode):
    """Dispatch by each rank's place on the axes ``dp``, ``pp``, ``cp`` and ``tp``, of which all other modes are cases.

    By itself it cuts nothing: every rank gets all arguments, and there is a list of results.

    Attributes:
        split_axes: the parts of the arguments are numbered along these axes, the last one fastest. Ranks that differ
            along other axes get the same part.
        collect_axes: likewise, there is one result for each place on these axes. It is taken from the rank that is
            last along ``pp`` and first along every other axis that is not among them.
    """

    split_axes: tuple[str, ...] = ("dp",)
    collect_axes: tuple[str, ...] = ("dp",)

    def mesh(self, layouts: Sequence[RankLayout]) -> Sequence[RankLayout]:
        """The places of the ranks that this mode goes by."""
        return layouts

    def cut(self, arguments: Mapping[str, Any], parts: int) -> list[dict[str, Any]]:
        """The arguments of each part, by the same names and in the same order; ValueError names one that is wrong."""
        return [dict(arguments) for _ in range(parts)]

    def join(self, results: list[Any]) -> Any:
        """The caller's result of those that were collected."""
        return results

    def split(self, layouts: Sequence[RankLayout], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Call]:
        layouts = self.mesh(layouts)
        places = {tuple(getattr(layout, axis) for axis in AXES) for layout in layouts}
        if len(places) != len(layouts) or any(_size(layout, AXES) != len(layouts) for layout in layouts):
            raise ValueError(f"the ranks make no mesh: {list(layouts)}")
        names = [*(f"argument {number}" for number in range(len(args))), *kwargs]
        parts = self.cut(dict(zip(names, (*args, *kwargs.values()))), _size(layouts[0], self.split_axes))
        calls: list[Call] = []
        for layout in layouts:
            mine = [_own(value) for value in parts[_place(layout, self.split_axes)].values()]
            calls.append((tuple(mine[: len(args)]), dict(zip(kwargs, mine[len(args) :]))))
        return calls

    def collect(self, layouts: Sequence[RankLayout], outputs: Sequence[Any]) -> Any:
        chosen: dict[int, Any] = {}
        for layout, output in zip(self.mesh(layouts), outputs, strict=True):
            here = {axis: (getattr(layout, axis), layout.pp_size - 1 if axis == "pp" else 0) for axis in AXES}
            if all(index == wanted for axis, (index, wanted) in here.items() if axis not in self.collect_axes):
                chosen[_place(layout, self.collect_axes)] = output
        return self.join([chosen[place] for place in sorted(chosen)])


class OneToAll(MeshMode):
    """The same arguments to every rank; the results in the order of ranks, or the one result of a single rank."""

    split_axes = ()

    def mesh(self, layouts: Sequence[RankLayout]) -> Sequence[RankLayout]:
        return _by_rank(layouts)

    def join(self, results: list[Any]) -> Any:
        return results[0] if len(results) == 1 else results


class RankZero(OneToAll):
    """All arguments to rank 0, and its result; no other rank takes part."""

    def ranks(self, layouts: Sequence[RankLayout]) -> list[int]:
        return [0]


class DPCompute(MeshMode):
    """Each argument a list or tuple with one element for each data-parallel index; the results as such a list."""

    def cut(self, arguments: Mapping[str, Any], parts: int) -> list[dict[str, Any]]:
        for name, value in arguments.items():
            if not isinstance(value, list | tuple) or len(value) != parts:
                found = f"{len(value)} elements" if isinstance(value, list | tuple) else f"a {type(value).__name__}"
                raise ValueError(f"{name} must be a list of {parts} elements, one for each part of the call; "
                                 f"it is {found}")  # fmt: skip
        return [{name: value[part] for name, value in arguments.items()} for part in range(parts)]


class AllToAll(DPCompute):
    """Each argument a list or tuple with one element for each rank; the results in the order of ranks."""

    def mesh(self, layouts: Sequence[RankLayout]) -> Sequence[RankLayout]:
        return _by_rank(layouts)


def _by_rank(layouts: Sequence[RankLayout]) -> list[RankLayout]:
    """Each rank by itself, whatever it shares with others."""
    return [RankLayout(dp=rank, dp_size=len(layouts)) for rank in range(len(layouts))]


def _size(layout: RankLayout, axes: Sequence[str]) -> int:
    return math.prod(getattr(layout, f"{axis}_size") for axis in axes)


def _place(layout: RankLayout, axes: Sequence[str]) -> int:
    """Number of a rank's place along some axes, the last one fastest."""
    place = 0
    for axis in axes:
        place = place * getattr(layout, f"{axis}_size") + getattr(layout, axis)
    return place


def _own(value: Any) -> Any:
    """A rank's own container of what the caller's holds, so that a worker in this process cannot change that."""
    if isinstance(value, DataProto):
        return value.with_columns()
    return copy.copy(value) if isinstance(value, list | dict) else value
