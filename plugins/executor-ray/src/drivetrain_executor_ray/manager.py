"""Which role runs in which pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from drivetrain import UserError
from drivetrain_executor_ray.pools import RayResourcePool, Reservation, reserve


class ResourcePoolManager:
    """Pools by name, and roles by pool.

    Args:
        resource_pool_spec: number of processes on every node of each pool, such as ``{"all": [8, 8]}``.
        mapping: pool of each role, such as ``{"actor": "all", "rollout": "all", "critic": "all"}``.
        use_gpu, max_colocate_count, hardware, cpus_per_process: of every pool.

    Raises:
        UserError: a role is mapped to a pool that is not there.
    """

    def __init__(
        self,
        resource_pool_spec: Mapping[str, Sequence[int]],
        mapping: Mapping[str, str],
        *,
        use_gpu: bool = True,
        max_colocate_count: int = 1,
        hardware: str = "auto",
        cpus_per_process: float = 1.0,
    ) -> None:
        for role, pool in mapping.items():
            if pool not in resource_pool_spec:
                raise UserError(f"role {role} is in pool {pool!r}; there are {', '.join(resource_pool_spec)}",
                                where="placement.roles")  # fmt: skip
        self.mapping = dict(mapping)
        self.pools = {
            name: RayResourcePool(nodes, use_gpu, max_colocate_count, name, hardware=hardware,
                                  cpus_per_process=cpus_per_process)
            for name, nodes in resource_pool_spec.items()
        }  # fmt: skip

    def get_resource_pool(self, role: str) -> RayResourcePool:
        """The pool of a role."""
        return self.pools[self.mapping[role]]

    def create_resource_pool(self, timeout_s: float = 300.0) -> list[Reservation]:
        """Reserve all pools, or none; returns what was reserved.

        Raises:
            UserError: they do not fit the cluster together; it says what is missing where.
        """
        return reserve(list(self.pools.values()), timeout_s)
