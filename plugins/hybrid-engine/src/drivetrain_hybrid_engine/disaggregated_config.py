"""The section ``hybrid_engine`` with ``name: disaggregated``. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pydantic import Field

from drivetrain import Problem
from drivetrain_hybrid_engine.config import SAME_PROCESS, SendingConfig

if TYPE_CHECKING:
    from drivetrain import RunConfig
    from drivetrain.seam.registry import Registry

SAME_DEVICE = "weight_transport.same_device"
"""Capability of a transport whose ends are on one device, in processes of their own."""


class DisaggregatedConfig(SendingConfig):
    """How weights get from the group that trains to the group that generates."""

    name: str = Field("disaggregated", description="Name of the plugin.")
    transport: str = Field(
        "auto",
        description="Weight transport by name. auto: ipc where the groups share devices that are not the host, and"
        " elsewhere the hardware's communication backend, such as nccl or gloo; the line placement says which.",
    )

    def check(self, run: RunConfig, registry: Registry) -> Iterable[Problem]:
        yield from super().check(run, registry)
        if self.transport == "auto":
            return
        found = registry.find("weight_transports", self.transport)
        apart = run.placement is not None and run.placement.pool_of("rollout") != run.placement.pool_of("actor")
        if found.problem:
            yield Problem(key="transport", what=found.problem.what, mend=found.problem.mend)
        elif SAME_PROCESS in found.spec.provides or (apart and SAME_DEVICE in found.spec.provides):
            bound = {SAME_PROCESS, SAME_DEVICE} if apart else {SAME_PROCESS}
            specs = registry.specs("weight_transports")
            fit = ["auto", *(spec.name for spec in specs if not bound.intersection(spec.provides))]
            one = "process" if SAME_PROCESS in found.spec.provides else "device"
            where = "have processes of their own" if one == "process" else "are in different pools"
            yield Problem(
                key="transport", mend=f"choose {' or '.join(fit)}",
                what=f"weight transport {self.transport!r} has both its ends on one {one}, and with hybrid engine "
                     f"{self.name!r} actor and rollout {where}",
            )  # fmt: skip
