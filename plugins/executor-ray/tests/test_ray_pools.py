"""Pools: what they ask of a cluster, and what is said when it has less."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray
from ray_rig import Rows, config_of

from drivetrain import UserError
from drivetrain_executor_ray import (
    Crew,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    ResourcePoolManager,
    merge_resource_pools,
)
from drivetrain_executor_ray.feasibility import Demand, Node, check_feasible


def demand(what: str, bundles: int, **bundle: float) -> Demand:
    return Demand(what=what, bundles=bundles, bundle=bundle)


def node(address: str, free: dict[str, float], total: dict[str, float] | None = None) -> Node:
    return Node(id=address, address=address, free=free, total=total or free)


def test_uneven_nodes_are_filled_the_largest_part_first() -> None:
    nodes = [node("10.0.0.2", {"GPU": 8, "CPU": 64}), node("10.0.0.1", {"GPU": 4, "CPU": 64})]
    check_feasible([demand("a", 4, GPU=1, CPU=1), demand("b", 8, GPU=1, CPU=1)], nodes)


def test_what_is_missing_is_said_for_every_node() -> None:
    nodes = [
        node("10.0.0.10", {"GPU": 8, "CPU": 64}),
        node("10.0.0.9", {"GPU": 2, "CPU": 64}, {"GPU": 8, "CPU": 64}),
    ]
    with pytest.raises(UserError) as error:
        check_feasible(
            [demand("pool 'train', node 1 of 2", 8, GPU=1), demand("pool 'train', node 2 of 2", 8, GPU=1)], nodes
        )
    lines = str(error.value).splitlines()
    assert lines[0] == "the placement does not fit the cluster; 1 of 2 parts fit (placement)"
    assert "needs 8 GPU on one node" in lines[1] and "pool 'train', node" in lines[1]
    assert lines[2].split(maxsplit=2)[1:] == ["10.0.0.9", "2 of 8 GPU left (6 in use)"]
    assert lines[3].split(maxsplit=2)[1:] == ["10.0.0.10", "0 of 8 GPU left (8 for parts that fit)"]


def test_a_part_is_never_spread_over_nodes() -> None:
    with pytest.raises(UserError, match="needs 8 GPU"):
        check_feasible([demand("all", 8, GPU=1)], [node("a", {"GPU": 4}), node("b", {"GPU": 4})])


def test_pools_split_and_merge() -> None:
    pool = RayResourcePool([3, 2], use_gpu=False)
    left, right = pool.split([2, 3])
    assert (left.process_on_nodes, right.process_on_nodes) == ([2], [1, 2])
    merged = merge_resource_pools(left, right)
    assert merged.slots == pool.slots and merged.process_on_nodes == [3, 2]
    with pytest.raises(UserError, match="twice"):
        merge_resource_pools(pool, left)
    with pytest.raises(UserError, match="cannot be split"):
        pool.split([2, 2])
    with pytest.raises(UserError, match="differ in use_gpu"):
        merge_resource_pools(left, RayResourcePool([1], use_gpu=True))


def test_a_pool_that_is_too_large_is_refused_before_anything_starts(cluster: None) -> None:
    manager = ResourcePoolManager({"train": [2], "judge": [400]}, {"actor": "train", "reward": "judge"}, use_gpu=False)
    with pytest.raises(UserError, match="(?s)pool 'judge' +needs 400 CPU on one node.*of 16 CPU left"):
        manager.create_resource_pool()
    assert all(r.group is None for pool in manager.pools.values() for r in pool.reservations())


def test_devices_that_the_cluster_does_not_have(cluster: None) -> None:
    with pytest.raises(UserError, match="asks for devices, and the cluster has none"):
        RayResourcePool([1], use_gpu=True).reservations()


def test_a_role_in_no_pool() -> None:
    with pytest.raises(UserError, match="role critic is in pool 'b'; there are a"):
        ResourcePoolManager({"a": [1]}, {"critic": "b"})


def test_groups_on_parts_of_a_pool_and_two_on_one_bundle(cluster: None, folder: Path) -> None:
    made = RayClassWithInitArgs(cls=ray.remote(Rows), config=config_of(folder), role="rows")
    pool = RayResourcePool([2, 1], use_gpu=False, max_colocate_count=2, cpus_per_process=0.5)
    first, rest = pool.split([1, 2])
    crew = Crew()
    one = RayWorkerGroup(first, made, "one", crew=crew)
    two = RayWorkerGroup(rest, made, "two", crew=crew)
    both = RayWorkerGroup(pool, made, "both", crew=crew)
    assert one.hello() == "0/1"
    assert two.hello("r") == ["r0/2", "r1/2"] and two.world_size == 2
    assert both.hello() == ["0/3", "1/3", "2/3"]
    assert set(both.all_reduced()) == {3.0}
    with pytest.raises(UserError, match="room for 2 worker groups, and three is one more"):
        RayWorkerGroup(first, made, "three", crew=Crew())
    crew.end()
