"""The executor ``ray``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from drivetrain import Executor, GroupPlan, UserError, WorkerGroup
from drivetrain.seam.registry import import_target
from drivetrain_executor_ray.cluster import ray_init

if TYPE_CHECKING:
    from drivetrain import RunConfig
    from drivetrain_executor_ray.config import RayConfig


class RayExecutor(Executor):
    """Starts worker groups in pools of processes on Ray."""

    config: RayConfig

    def start(self, plans: Sequence[GroupPlan], run: RunConfig) -> Mapping[str, WorkerGroup]:
        c = self.config
        self._leave: Callable[[], None] = ray_init(
            address=c.address, namespace=c.namespace, runtime_env=c.runtime_env, num_cpus=c.num_cpus
        )
        from drivetrain_executor_ray.crew import Crew
        from drivetrain_executor_ray.devices import has_devices
        from drivetrain_executor_ray.groups import RayClassWithInitArgs, RayWorkerGroup, create_colocated_worker_cls
        from drivetrain_executor_ray.manager import ResourcePoolManager
        from drivetrain_executor_ray.preflight import absolute, check_nodes
        from drivetrain_executor_ray.settings import Settings

        run = absolute(run)
        self._crew = Crew()
        placement = c.placement(run)
        pools = ResourcePoolManager(
            placement.pools, {role: placement.pool_of(role) for plan in plans for role in plan.roles},
            use_gpu=has_devices(run.hardware.name), hardware=run.hardware.name,
            max_colocate_count=c.max_colocate_count, cpus_per_process=c.cpus_per_process,
        )  # fmt: skip
        settings = Settings(
            start_timeout_s=c.start_timeout_s, call_timeout_s=c.call_timeout_s, log_lines=c.log_lines,
            log_dir=run.trainer.run_dir / "logs", reference_bytes=c.reference_bytes,
        )  # fmt: skip
        reserved = pools.create_resource_pool(c.start_timeout_s)
        self._crew.add([], reserved)
        reads = [("checkpoint", path.absolute()) for plan in plans for path in plan.reads]
        check_nodes([part.node_id for part in reserved], [*run.inputs(), *reads], run.trainer.run_dir,
                    timeout_s=c.start_timeout_s, refuse=c.preflight == "refuse")  # fmt: skip
        groups: dict[str, WorkerGroup] = {}
        made = {plan.name: RayClassWithInitArgs(import_target(plan.worker), config=run, role="_".join(plan.roles))
                for plan in plans}  # fmt: skip
        for name, pool in pools.pools.items():
            there = {plan.name: made[plan.name] for plan in plans if placement.pool_of(plan.roles[0]) == name}
            if c.max_colocate_count == 1 and there:
                together = RayWorkerGroup(pool, create_colocated_worker_cls(there), settings=settings, crew=self._crew)
                groups |= together.spawn(there)
            elif len(there) > c.max_colocate_count:
                raise UserError(f"pool {name!r} has {len(there)} worker groups, {', '.join(there)}, and room for "
                                f"{c.max_colocate_count} a device", where="executor.max_colocate_count",
                                mend=f"set it to {len(there)}, or to 1 for one process")  # fmt: skip
            else:
                for group, worker in there.items():
                    groups[group] = RayWorkerGroup(pool, worker, group, settings=settings, crew=self._crew)
        return groups

    def shutdown(self) -> None:
        if crew := self.__dict__.pop("_crew", None):
            crew.end()
        if leave := self.__dict__.pop("_leave", None):
            leave()
