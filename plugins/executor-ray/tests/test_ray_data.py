"""Data: parts and their order, results that stay where they are, and what is counted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from ray_rig import Rows, config_of

from drivetrain import DataProto
from drivetrain.metrics import to_floats
from drivetrain_executor_ray import (
    Crew,
    FutureBatch,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    Settings,
    create_colocated_worker_cls,
)
from drivetrain_executor_ray.transport import SENT_BYTES, RayColumn, pack, unpack


@pytest.fixture(scope="module")
def groups(cluster: None, folder: Path) -> Iterator[dict[str, RayWorkerGroup]]:
    made = RayClassWithInitArgs(cls=Rows, config=config_of(folder), role="rows")
    crew = Crew()
    cls = create_colocated_worker_cls({"a": made, "b": made})
    pool = RayResourcePool([2], use_gpu=False)
    yield RayWorkerGroup(pool, cls, settings=Settings(reference_bytes=0), crew=crew).spawn(["a", "b"])
    crew.end()


def numbers(rows: int) -> DataProto:
    x = torch.arange(rows * 3).reshape(rows, 3)
    return DataProto.from_single_dict({"x": x, "name": [f"n{row}" for row in range(rows)]}, {"about": 1})


def test_parts_come_back_in_order(groups: dict[str, RayWorkerGroup]) -> None:
    batch = numbers(6)
    out = groups["a"].double(batch)
    assert torch.equal(out["y"], batch["x"] * 2)
    assert out["rank"].tolist() == [0, 0, 0, 1, 1, 1]
    assert to_floats(groups["b"].total(batch)) == {"x": float(batch["x"].sum())}


def test_colocated_workers_share_processes(groups: dict[str, RayWorkerGroup]) -> None:
    assert groups["a"].pid() == groups["b"].pid()
    assert len(set(groups["a"].pid())) == 2


def test_a_result_stays_where_it_is_until_it_is_looked_at(groups: dict[str, RayWorkerGroup]) -> None:
    batch = numbers(6)
    groups["a"].take_metrics()
    out = groups["a"].double(batch)
    moved = groups["a"].take_metrics()["transfer/bytes"]
    held = out.batch.data["y"]
    assert not isinstance(held, torch.Tensor) and held.shape == (6, 3)
    shipped = groups["b"].plus_one(out.select(["y", "rank"])).get()
    assert torch.equal(shipped["z"], batch["x"] * 2 + 1)
    assert held._fetched is None, "the driver has read a column that it only passed on"
    assert torch.equal(out["y"], batch["x"] * 2)
    assert moved >= batch["x"].numpy().nbytes * 2


def test_a_future_goes_into_the_next_call_without_waiting(groups: dict[str, RayWorkerGroup]) -> None:
    batch = numbers(6)
    first = groups["a"].later(batch)
    assert isinstance(first, FutureBatch)
    second = groups["b"].plus_one(first, more=5)
    assert not first.pending.done, "the first call was waited for"
    assert torch.equal(second["z"], batch["x"] * 2 + 5)
    assert second["before"].tolist() == second["here"].tolist() == [0, 0, 0, 1, 1, 1]
    assert not first.pending.done
    assert torch.equal(first["y"], batch["x"] * 2) and first.pending.done


def test_futures_of_futures_and_batches_beside_them(groups: dict[str, RayWorkerGroup]) -> None:
    batch = numbers(4)
    first = groups["a"].call("double", batch, blocking=False)
    second = groups["a"].plus_one(first)
    third = groups["b"].call("plus_one", second.get().rename({"z": "y", "before": "rank"}), blocking=False)
    assert torch.equal(third["z"], batch["x"] * 2 + 2)
    union = batch.union(groups["a"].later(batch))
    assert torch.equal(union["y"], batch["x"] * 2) and len(union) == 4


def test_a_future_of_another_split_is_taken_by_rows(groups: dict[str, RayWorkerGroup], folder: Path) -> None:
    crew = Crew()
    made = RayClassWithInitArgs(cls=Rows, config=config_of(folder), role="rows")
    three = RayWorkerGroup(RayResourcePool([3], use_gpu=False), made, "three", crew=crew)
    batch = numbers(6)
    second = three.plus_one(groups["a"].later(batch))
    assert torch.equal(second["z"], batch["x"] * 2 + 1)
    assert second["here"].tolist() == [0, 0, 1, 1, 2, 2] and second["before"].tolist() == [0, 0, 0, 1, 1, 1]
    crew.end()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float16])
def test_every_type_of_tensor_travels(cluster: None, dtype: torch.dtype) -> None:
    batch = DataProto.from_single_dict({"x": torch.tensor([[1, 0], [0, 1], [1, 1]]).to(dtype)}, {"m": 2})
    assert unpack(pack(batch)).equal(batch)
    assert unpack(pack(batch, 0))["x"].equal(batch["x"])
    assert RayColumn(batch["x"]).read_rows(torch.tensor([2, 0]).numpy()).equal(batch["x"][[2, 0]])


def test_a_batch_that_arrived_can_be_written_to(groups: dict[str, RayWorkerGroup]) -> None:
    out = groups["a"].double(numbers(4))
    out["y"][0, 0] = 7
    assert out["y"][0, 0] == 7


def test_what_moves_is_counted_where_it_is_written_and_where_it_is_read(groups: dict[str, RayWorkerGroup]) -> None:
    groups["a"].take_metrics()
    out = groups["a"].double(numbers(6))
    x, rank = 6 * 3 * 8, 6 * 8
    assert groups["a"].take_metrics()["transfer/bytes"] == 2 * x + x + 2 * rank  # x there; y, rank and pid lie there
    assert out["y"].shape == (6, 3)
    assert groups["a"].take_metrics()["transfer/bytes"] == x


def test_a_large_column_is_sent_once_until_it_is_written_to(groups: dict[str, RayWorkerGroup]) -> None:
    batch = numbers(SENT_BYTES // 8)
    size = batch["x"].numel() * 8
    groups["b"].take_metrics()
    moved = []
    for _ in range(2):
        assert to_floats(groups["b"].total(batch)) == {"x": float(batch["x"].sum())}
        moved.append(groups["b"].take_metrics()["transfer/bytes"])
    assert moved == [2 * size, size]
    batch["x"][0, 0] = 1000
    assert to_floats(groups["b"].total(batch)) == {"x": float(batch["x"].sum())}
    assert groups["b"].take_metrics()["transfer/bytes"] == 2 * size
