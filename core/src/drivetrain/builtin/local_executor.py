"""The built-in executor: every worker in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from drivetrain.config import RunConfig
from drivetrain.contracts.placement import Executor, GroupPlan, WorkerGroup
from drivetrain.seam.registry import import_target
from drivetrain.workers.registration import dispatch_call, registration
from drivetrain.workers.worker import Worker


class LocalWorkerGroup(WorkerGroup):
    """A group of one worker, called directly."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    @property
    def world_size(self) -> int:
        return 1

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        layouts = [self.worker.layout(registration(type(self.worker), method).mesh)]
        call = dispatch_call(type(self.worker), method, layouts, args, kwargs)
        return call.collect([getattr(self.worker, method)(*args, **kwargs) for args, kwargs in call.calls])


class LocalExecutor(Executor):
    """Starts each group as one worker in this process."""

    def start(self, plans: Sequence[GroupPlan], run: RunConfig) -> Mapping[str, WorkerGroup]:
        self._groups = {
            plan.name: LocalWorkerGroup(import_target(plan.worker)(run, "_".join(plan.roles))) for plan in plans
        }
        return self._groups

    def shutdown(self) -> None:
        for group in getattr(self, "_groups", {}).values():
            group.worker.close()
        self._groups = {}
