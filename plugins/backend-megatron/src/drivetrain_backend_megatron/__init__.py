"""The backend ``megatron``, Megatron's dispatch modes, and workers under the names that its users know.

Names are imported on use, so that this imports neither torch nor Ray.
"""

from __future__ import annotations

import importlib
from typing import Any

from drivetrain import UserError

_NAMES = {
    "Family": "families",
    "MegatronGlobalInfo": "workers",
    "MegatronPPOActor": "workers",
    "MegatronRankInfo": "workers",
    "MegatronRayWorkerGroup": "ray_groups",
    "MegatronWorker": "workers",
}
_RAY = "drivetrain_executor_ray"

__all__ = list(_NAMES)


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'drivetrain_backend_megatron' has no attribute {name!r}")
    try:
        module = importlib.import_module(f"drivetrain_backend_megatron.{_NAMES[name]}")
    except ModuleNotFoundError as error:
        if error.name != _RAY:
            raise
        raise UserError(f"{name} needs drivetrain-executor-ray", where="drivetrain_backend_megatron",
                        mend="pip install 'drivetrain-backend-megatron[ray]'") from error  # fmt: skip
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
