"""What every worker is: a process that plays some roles on some hardware."""

from __future__ import annotations

import os

from drivetrain.config import RunConfig
from drivetrain.contracts.hardware import Hardware
from drivetrain.contracts.mesh import RankLayout
from drivetrain.seam.registry import resolve


class Worker:
    """A member of a worker group. It gets names and config, and resolves plugins by itself.

    Args:
        config: of the run.
        role: the roles it plays, joined by ``_``, such as ``actor_rollout_ref``.
    """

    def __init__(self, config: RunConfig, role: str) -> None:
        self.config = config
        self.roles = tuple(role.split("_"))
        self.rank = int(os.environ.get("RANK", 0))
        self.world_size = int(os.environ.get("WORLD_SIZE", 1))
        self.local_rank = int(os.environ.get("LOCAL_RANK", 0))
        self.hardware: Hardware = resolve("hardware", config.hardware.name)(config.hardware)

    def layout(self, mesh: str) -> RankLayout:
        """Where this rank stands in a mesh."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of devices and files."""
