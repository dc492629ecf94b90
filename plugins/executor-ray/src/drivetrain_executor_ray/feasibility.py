"""Whether a placement fits the cluster, before anything is asked of it."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from drivetrain import UserError

Resources = Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node of the cluster."""

    id: str
    address: str
    total: Resources
    free: Resources


@dataclass(frozen=True, kw_only=True)
class Demand:
    """Bundles that have to be on one node."""

    what: str  # such as: pool 'train', node 2 of 2
    bundles: int
    bundle: Resources  # each

    @property
    def total(self) -> dict[str, float]:
        """Of all bundles."""
        return {name: self.bundles * amount for name, amount in self.bundle.items()}


@dataclass
class _Room:
    node: Node
    left: dict[str, float] = field(default_factory=dict)

    def lacks(self, demand: Demand) -> bool:
        return any(self.left.get(name, 0.0) + 1e-6 < amount for name, amount in demand.total.items())


def check_feasible(demands: Sequence[Demand], nodes: Sequence[Node]) -> None:
    """Place the largest demands first, each on the fullest node that has room for it.

    Raises:
        UserError: some do not fit; it names each of them, what it needs, and what every node has left.
    """
    rooms = [_Room(node, dict(node.free)) for node in sorted(nodes, key=lambda node: address_key(node.address))]
    scarce = {name for demand in demands for name in demand.bundle}
    missing: list[Demand] = []
    for demand in sorted(demands, key=lambda d: [-d.total.get(n, 0.0) for n in sorted(scarce, key=_devices_first)]):
        fitting = [room for room in rooms if not room.lacks(demand)]
        if not fitting:
            missing.append(demand)
            continue
        room = min(fitting, key=lambda r: [r.left.get(n, 0.0) for n in sorted(scarce, key=_devices_first)])
        for name, amount in demand.total.items():
            room.left[name] -= amount
    if missing:
        rows = [(demand.what, f"needs {_say(demand.total)} on one node") for demand in missing]
        rows += [(f"node {room.node.address}", _room(room, sorted(scarce, key=_devices_first))) for room in rooms]
        placed = len(demands) - len(missing)
        why = f"; {placed} of {len(demands)} parts fit" if placed else ""
        raise UserError(f"the placement does not fit the cluster{why}", where="placement", details=rows,
                        mend="ask for fewer processes a node, add nodes, or wait for others to end")  # fmt: skip


def address_key(address: str) -> tuple[int, str]:
    """Sorts addresses by number, and names after them."""
    try:
        return int(ipaddress.ip_address(address)), ""
    except ValueError:
        return 1 << 129, address


def cluster_nodes() -> list[Node]:
    """The nodes that are alive, and what is free on each."""
    import ray
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()
    return [Node(id=node["NodeID"], address=node["NodeManagerAddress"], total=node["Resources"],
                 free=free.get(node["NodeID"], {})) for node in ray.nodes() if node["Alive"]]  # fmt: skip


def _devices_first(name: str) -> tuple[bool, str]:
    return name == "CPU", name


def _say(resources: Resources) -> str:
    return " and ".join(f"{amount:g} {name}" for name, amount in sorted(resources.items(), key=lambda r: r[0] == "CPU"))


def _room(room: _Room, names: Sequence[str]) -> str:
    """What a node has, what others took, and what the parts that fit take."""
    parts = []
    for name in names:
        total, free, left = (have.get(name, 0.0) for have in (room.node.total, room.node.free, room.left))
        taken = [f"{total - free:g} in use"] * (total > free) + [f"{free - left:g} for parts that fit"] * (free > left)
        parts.append(f"{left:g} of {total:g} {name} left" + (f" ({', '.join(taken)})" if taken else ""))
    return ", ".join(parts)
