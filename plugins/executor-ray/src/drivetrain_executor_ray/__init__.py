"""Worker groups on Ray, as a plugin of drivetrain. Names are imported on use, so that this imports no Ray."""

from __future__ import annotations

import importlib
from typing import Any

_NAMES = {
    "ColocatedWorkers": "groups",
    "Crew": "crew",
    "FutureBatch": "futures",
    "FutureResult": "futures",
    "RayClassWithInitArgs": "groups",
    "RayExecutor": "executor",
    "RayResourcePool": "pools",
    "RayWorkerGroup": "groups",
    "ResourcePoolManager": "manager",
    "Settings": "settings",
    "create_colocated_worker_cls": "groups",
    "merge_resource_pools": "pools",
    "ray_init": "cluster",
}

__all__ = list(_NAMES)


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(importlib.import_module(f"drivetrain_executor_ray.{_NAMES[name]}"), name)
    raise AttributeError(f"module 'drivetrain_executor_ray' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
