"""How a call is spread over ranks, as tables."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from drivetrain.builtin.dispatch import DPComputeMetric, DPComputeProto, OneToAll
from drivetrain.contracts.mesh import RankLayout
from drivetrain.metrics import Max, Mean, Sum
from drivetrain.protocol import DataProto


def mesh(**sizes: int) -> list[RankLayout]:
    """The layouts of all ranks, the last dimension named running fastest."""
    places: list[dict[str, int]] = [{}]
    for name, size in sizes.items():
        places = [{**place, name: index} for place in places for index in range(size)]
    return [RankLayout(**place, **{f"{name}_size": size for name, size in sizes.items()}) for place in places]


def rows(count: int) -> DataProto:
    return DataProto.from_single_dict({"row": torch.arange(count), "uid": [f"p{row}" for row in range(count)]})


def numbers(part: Any) -> Any:
    return part["row"].tolist() if isinstance(part, DataProto) else part


# layout, rows, what each rank gets, ranks that are collected from in the order in which their parts are joined
TABLE = [
    (mesh(dp=1), 3, [[0, 1, 2]], [0]),
    (mesh(dp=2), 4, [[0, 1], [2, 3]], [0, 1]),
    (mesh(dp=3), 7, [[0, 1], [2, 3], [4, 5, 6]], [0, 1, 2]),
    (mesh(dp=3), 2, [[], [0], [1]], [0, 1, 2]),
    (mesh(dp=2, tp=2), 4, [[0, 1], [0, 1], [2, 3], [2, 3]], [0, 2]),
    (mesh(tp=2, dp=2), 4, [[0, 1], [2, 3], [0, 1], [2, 3]], [0, 1]),
    (mesh(pp=2, dp=2), 4, [[0, 1], [2, 3], [0, 1], [2, 3]], [2, 3]),
    (mesh(dp=2, cp=2), 4, [[0, 1], [0, 1], [2, 3], [2, 3]], [0, 2]),
    (mesh(pp=2, dp=1, cp=2, tp=2), 3, [[0, 1, 2]] * 8, [4]),
    (mesh(pp=2, dp=2, tp=2), 3, [[0], [0], [1, 2], [1, 2]] * 2, [4, 6]),
    (mesh(dp=2)[::-1], 3, [[1, 2], [0]], [1, 0]),  # ranks in another order than their indices
]


@pytest.mark.parametrize("layouts, count, parts, collected", TABLE)
def test_batches_go_in_parts_and_come_back_in_order(layouts, count, parts, collected) -> None:
    mode = DPComputeProto()
    calls = mode.split(layouts, (rows(count), "all"), {"again": rows(count), "factor": 0.5})
    assert [[numbers(argument) for argument in args] for args, _ in calls] == [[part, "all"] for part in parts]
    assert [{k: numbers(v) for k, v in kwargs.items()} for _, kwargs in calls] == [
        {"again": part, "factor": 0.5} for part in parts
    ]
    marked = [args[0].with_columns(rank=torch.full((len(args[0]),), rank)) for rank, (args, _) in enumerate(calls)]
    whole = mode.collect(layouts, marked)
    assert whole["row"].tolist() == list(range(count))
    assert whole["rank"].tolist() == [rank for rank in collected for _ in parts[rank]]


@pytest.mark.parametrize("layouts, count, parts, collected", TABLE)
def test_metrics_are_merged_over_data_parallel_ranks_alone(layouts, count, parts, collected) -> None:
    outputs = [{"a": Sum(2.0**rank), "b": Max(rank), "c": Mean(len(part), 1)} for rank, part in enumerate(parts)]
    merged = DPComputeMetric().collect(layouts, outputs)
    assert merged["a"].result() == sum(2.0**rank for rank in collected)
    assert merged["b"].result() == max(collected)
    assert merged["c"].result() == pytest.approx(count / len(collected))


def test_one_to_all_gives_every_rank_the_same() -> None:
    batch = rows(3)
    calls = OneToAll().split(mesh(dp=2, tp=2), (batch,), {"folder": "f"})
    assert len(calls) == 4 and all(args == (batch,) and kwargs == {"folder": "f"} for args, kwargs in calls)
    assert OneToAll().collect(mesh(dp=2, tp=2), [1, 2, 3, 4]) == [1, 2, 3, 4]
    assert OneToAll().collect(mesh(dp=1), [{"a": 1}]) == {"a": 1}


def test_the_callers_batch_is_not_changed() -> None:
    batch, before = rows(5), rows(5)
    for args, _ in DPComputeProto().split(mesh(dp=2), (batch,), {}):
        args[0].batch["row"] = args[0]["row"] + 100
        args[0].meta_info["mine"] = 1
        args[0].pop(["uid"])
    assert batch.equal(before)
