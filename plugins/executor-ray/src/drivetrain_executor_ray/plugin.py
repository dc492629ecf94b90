"""What this distribution offers: the executor ``ray`` and the command ``submit``. Imports neither torch nor Ray."""

from __future__ import annotations

from collections.abc import Iterable

from drivetrain import CommandSpec, ExecutorSpec, hookimpl


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


@hookimpl
def drivetrain_commands() -> Iterable[CommandSpec]:
    """The command ``submit``."""
    yield CommandSpec(
        name="submit",
        summary="Train on a Ray cluster as one of its jobs.",
        factory="drivetrain_executor_ray.submit:submit",
    )
