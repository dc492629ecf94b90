"""Pools of processes: placement groups on the nodes of a cluster."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from drivetrain import UserError
from drivetrain_executor_ray.devices import ray_resource
from drivetrain_executor_ray.feasibility import Demand, check_feasible, cluster_nodes


@dataclass(eq=False)
class Reservation:
    """Bundles on one node, one for each process; a placement group once it is made."""

    what: str
    bundles: int
    bundle: dict[str, float]
    group: PlacementGroup | None = None
    groups_in: dict[int, int] = field(default_factory=dict)  # worker groups in each bundle

    @property
    def demand(self) -> Demand:
        """What is asked of the cluster."""
        return Demand(what=self.what, bundles=self.bundles, bundle=self.bundle)

    @property
    def node_id(self) -> str:
        """The node of all bundles, once they are had."""
        return str(next(iter(placement_group_table(self.group)["bundles_to_node_id"].values())))

    def remove(self) -> None:
        """Give the bundles back."""
        if self.group is not None and ray.is_initialized():
            remove_placement_group(self.group)
        self.group = None
        self.groups_in.clear()


@dataclass(frozen=True)
class Slot:
    """Room for one process of every worker group that shares it."""

    reservation: Reservation
    bundle: int


class RayResourcePool:
    """Processes on nodes, each with a device of its own or with CPUs alone.

    Args:
        process_on_nodes: number of processes on every node; nodes may have different numbers. The processes of one
            entry are on one node.
        use_gpu: whether a process has a device; its kind is that of the hardware plugin.
        max_colocate_count: worker groups that share a bundle, each asking for 1/count of its device.
        name_prefix: name in messages.
        hardware: name of the hardware; ``auto`` finds the one kind of device that the cluster has.
        cpus_per_process: CPUs of each process of each worker group.
    """

    def __init__(
        self,
        process_on_nodes: Sequence[int],
        use_gpu: bool = True,
        max_colocate_count: int = 1,
        name_prefix: str = "pool",
        *,
        hardware: str = "auto",
        cpus_per_process: float = 1.0,
    ) -> None:
        if not process_on_nodes or min(process_on_nodes) < 1 or max_colocate_count < 1:
            raise UserError(f"a pool of {list(process_on_nodes)} processes with {max_colocate_count} worker groups a "
                            "bundle has no room", where=name_prefix)  # fmt: skip
        self.use_gpu, self.max_colocate_count, self.name = use_gpu, max_colocate_count, name_prefix
        self.hardware, self.cpus_per_process = hardware, cpus_per_process
        self._slots: list[Slot] = []
        for number, count in enumerate(process_on_nodes, 1):
            where = f", node {number} of {len(process_on_nodes)}" if len(process_on_nodes) > 1 else ""
            reservation = Reservation(f"pool {name_prefix!r}{where}", count, {})
            self._slots += [Slot(reservation, bundle) for bundle in range(count)]

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return len(self._slots)

    @property
    def process_on_nodes(self) -> list[int]:
        """Number of processes on every node."""
        return [len(list(slots)) for _, slots in itertools.groupby(self._slots, lambda slot: id(slot.reservation))]

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Room for each process."""
        return tuple(self._slots)

    @property
    def resource(self) -> str | None:
        """Ray's name of the devices; None for a pool of CPUs."""
        return ray_resource(self.hardware) if self.use_gpu else None

    def reservations(self) -> list[Reservation]:
        """What has to be had of the cluster, in the order of ranks."""
        found = list(dict.fromkeys(slot.reservation for slot in self._slots))
        for reservation in found:
            if not reservation.bundle:
                reservation.bundle = {"CPU": self.cpus_per_process * self.max_colocate_count}
                if resource := self.resource:
                    reservation.bundle[resource] = 1.0
        return found

    def split(self, sizes: Sequence[int]) -> list[RayResourcePool]:
        """Pools of these numbers of consecutive processes; they share this pool's bundles.

        Raises:
            UserError: the sizes do not add up.
        """
        if sum(sizes) != self.world_size or min(sizes, default=0) < 1:
            raise UserError(f"a pool of {self.world_size} processes cannot be split into {list(sizes)}",
                            where=self.name)  # fmt: skip
        bounds = [0, *itertools.accumulate(sizes)]
        return [self._of(self._slots[start:stop], f"{self.name}[{start}:{stop}]")
                for start, stop in zip(bounds, bounds[1:])]  # fmt: skip

    def _of(self, slots: Iterable[Slot], name: str) -> RayResourcePool:
        new = object.__new__(RayResourcePool)
        new.__dict__.update(self.__dict__, _slots=list(slots), name=name)
        return new


def merge_resource_pools(*pools: RayResourcePool) -> RayResourcePool:
    """One pool of the processes of several.

    Raises:
        UserError: they are of different kinds, or have a process in common.
    """
    first = pools[0]
    for other in pools[1:]:
        for key in ("use_gpu", "max_colocate_count", "hardware", "cpus_per_process"):
            if getattr(first, key) != getattr(other, key):
                raise UserError(f"pools {first.name!r} and {other.name!r} differ in {key}", where="merge of pools")
    slots = [slot for pool in pools for slot in pool.slots]
    if len(set(slots)) < len(slots):
        raise UserError("a process would be twice in one pool", where="merge of pools")
    return first._of(slots, "+".join(pool.name for pool in pools))


def reserve(pools: Sequence[RayResourcePool], timeout_s: float) -> list[Reservation]:
    """Get the bundles of pools, all or none; returns those that were not had before.

    Raises:
        UserError: they do not fit the cluster, or were not to be had in time.
    """
    new = list(dict.fromkeys(r for pool in pools for r in pool.reservations() if r.group is None))
    if not new:
        return []
    check_feasible([reservation.demand for reservation in new], cluster_nodes())
    try:
        for reservation in new:
            reservation.group = placement_group([reservation.bundle] * reservation.bundles, strategy="STRICT_PACK")
        ready: list[Any] = [reservation.group.ready() for reservation in new if reservation.group]
        done, waiting = ray.wait(ready, num_returns=len(ready), timeout=timeout_s)
        if waiting:
            late = [reservation.what for reservation, ref in zip(new, ready) if ref in waiting]
            raise UserError(f"{' and '.join(late)} could not be had within {timeout_s:g} s", where="placement",
                            mend="others may have taken the resources meanwhile; ray status shows them")  # fmt: skip
    except BaseException:
        for reservation in new:
            reservation.remove()
        raise
    return new
