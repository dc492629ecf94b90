"""What every worker is: a process that plays some roles on some hardware."""

from __future__ import annotations

from drivetrain.config import RunConfig
from drivetrain.contracts.hardware import Hardware
from drivetrain.contracts.mesh import RankLayout
from drivetrain.seam.registry import resolve
from drivetrain.seeds import derive_seed


class Worker:
    """A member of a worker group. It gets names and config, and resolves plugins by itself.

    Args:
        config: of the run.
        role: the roles it plays, joined by ``_``, such as ``actor_rollout_ref``.
        rank, world_size: position among the workers of its group.
        local_rank: position among those of its node.
    """

    def __init__(
        self, config: RunConfig, role: str, *, rank: int = 0, world_size: int = 1, local_rank: int = 0
    ) -> None:
        self.config = config
        self.roles = tuple(role.split("_"))
        self.rank, self.world_size, self.local_rank = rank, world_size, local_rank
        self.hardware: Hardware = resolve("hardware", config.hardware.name)(config.hardware)
        self.hardware.seed(derive_seed(config.trainer.seed, "worker", role, rank))

    def layout(self, mesh: str) -> RankLayout:
        """Where this rank stands in a mesh."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of devices and files."""
