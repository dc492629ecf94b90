"""The settings of the executor ``ray``. Imports neither torch nor Ray."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from drivetrain.config import PlacementConfig, PluginConfig, Problem

if TYPE_CHECKING:
    from drivetrain.config import RunConfig
    from drivetrain.seam.registry import Registry

POOL = "all"  # the pool of a run without a section placement


class RayConfig(PluginConfig):
    """The section ``executor`` when its name is ``ray``."""

    processes: int | None = Field(
        None, gt=0, description="Processes on one node, one a device, for all roles. Omitted: as placement says, or 1."
    )
    address: str | None = Field(None, description="Ray cluster to use, or auto. Omitted: start Ray here for this run.")
    namespace: str | None = Field(None, description="Ray namespace.")
    runtime_env: dict[str, Any] = Field({}, description="Ray runtime environment of the workers.")
    num_cpus: int | None = Field(None, gt=0, description="CPUs of a Ray started here. Omitted: those of the machine.")
    cpus_per_process: float = Field(1.0, gt=0, description="CPUs that a worker group asks for, a process.")
    max_colocate_count: int = Field(
        1, gt=0, description="1: all roles of a pool share processes. Over 1: every worker group has processes of its "
        "own, and this many share a device.",
    )  # fmt: skip
    preflight: Literal["refuse", "warn"] = Field(
        "refuse", description="What happens if a node lacks a path or has other versions than the driver."
    )
    start_timeout_s: float = Field(300.0, gt=0, description="Longest wait for resources, and for processes to start.")
    call_timeout_s: float = Field(1800.0, gt=0, description="Longest wait for a call, and in a collective call.")
    log_lines: int = Field(20, ge=0, description="Last lines of a worker's log that an error quotes.")
    reference_bytes: int = Field(
        16 << 20, ge=0, description="A column of a result that is this large stays where it is until it is looked at."
    )

    def placement(self, run: RunConfig) -> PlacementConfig:
        """Pools and roles of a run."""
        return run.placement or PlacementConfig(pools={POOL: (self.processes or 1,)})

    def check(self, run: RunConfig, registry: Registry) -> Iterable[Problem]:
        if self.processes is not None and run.placement is not None:
            yield Problem(key="processes", what="placement says how many processes there are",
                          mend="remove one of them")  # fmt: skip
        if self.address is not None and self.num_cpus is not None:
            yield Problem(key="num_cpus", what="a cluster that is there already has its CPUs", mend="remove num_cpus")
        pool = self.placement(run).pool_of("actor")
        processes = sum(self.placement(run).pools[pool])
        hybrid = registry.find("hybrid_engines", run.hybrid_engine.name).spec
        together = self.placement(run).pool_of("rollout") == pool and self.max_colocate_count == 1
        if together and run.two_groups(registry):
            yield Problem(
                key="max_colocate_count", what=f"with hybrid engine {run.hybrid_engine.name!r} actor and rollout are "
                f"processes of their own, and pool {pool!r} has room for one on each device",
                mend="set it to 2 or more, or give the rollout another pool",
            )  # fmt: skip
        if run.rollout is not None and processes > 1 and hybrid and "backend.live_module" in hybrid.requires:
            yield Problem(
                key="processes", what=f"the actor has {processes} processes, and hybrid engine {hybrid.name!r} "
                "generates with the model that is trained, which is sharded over them",
                mend="choose a hybrid engine that gives the rollout weights of its own",
            )  # fmt: skip
