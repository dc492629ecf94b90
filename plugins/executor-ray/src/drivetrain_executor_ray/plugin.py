"""What this distribution offers: the executor ``ray``. Imports neither torch nor Ray."""

from __future__ import annotations

from collections.abc import Iterable

from drivetrain import ExecutorSpec, hookimpl


@hookimpl
def drivetrain_executors() -> Iterable[ExecutorSpec]:
    """The executor ``ray``."""
    yield ExecutorSpec(
        name="ray",
        summary="Workers on Ray, in pools of processes over devices and nodes.",
        factory="drivetrain_executor_ray.executor:RayExecutor",
        config="drivetrain_executor_ray.config:RayConfig",
        provides=("executor.placement",),
    )
