"""The built-in dispatch modes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from drivetrain.contracts.mesh import Call, DispatchMode, RankLayout
from drivetrain.metrics import merge_metrics
from drivetrain.protocol import DataProto


class OneToAll(DispatchMode):
    """The same arguments to every rank; the results as a list, or the one result of a single rank."""

    def split(self, layouts: Sequence[RankLayout], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Call]:
        return [(args, dict(kwargs)) for _ in layouts]

    def collect(self, layouts: Sequence[RankLayout], outputs: Sequence[Any]) -> Any:
        return outputs[0] if len(outputs) == 1 else list(outputs)


class DPComputeProto(DispatchMode):
    """Each ``DataProto`` in contiguous parts over data-parallel ranks; the parts of the results joined in order.

    The ranks that share a data-parallel index get the same part; one of them is collected from: tensor and context
    rank 0 of the last pipeline stage. Parts differ by at most one row. Other arguments go to every rank.
    """

    def split(self, layouts: Sequence[RankLayout], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Call]:
        parts = [self._parts(value, layouts[0].dp_size) for value in (*args, *kwargs.values())]
        calls: list[Call] = []
        for layout in layouts:
            mine = [part[layout.dp] for part in parts]
            calls.append((tuple(mine[: len(args)]), dict(zip(kwargs, mine[len(args) :]))))
        return calls

    def collect(self, layouts: Sequence[RankLayout], outputs: Sequence[Any]) -> Any:
        chosen = {
            layout.dp: output
            for layout, output in zip(layouts, outputs)
            if layout.tp == 0 and layout.cp == 0 and layout.pp == layout.pp_size - 1
        }
        return self._join([chosen[index] for index in sorted(chosen)])

    def _join(self, parts: list[Any]) -> Any:
        return parts[0] if len(parts) == 1 else DataProto.concat(parts)

    @staticmethod
    def _parts(value: Any, count: int) -> list[Any]:
        if not isinstance(value, DataProto) or count == 1:
            return [value] * count
        bounds = [len(value) * index // count for index in range(count + 1)]
        return [value[start:stop] for start, stop in zip(bounds, bounds[1:])]


class DPComputeMetric(DPComputeProto):
    """As ``dp_compute_proto``, for methods that return metrics; these are merged."""

    def _join(self, parts: list[Any]) -> Any:
        return merge_metrics(parts)
