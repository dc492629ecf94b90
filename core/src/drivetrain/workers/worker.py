"""What every worker is: a process that plays some roles on some hardware."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

from drivetrain.config import RunConfig
from drivetrain.contracts.hardware import Hardware
from drivetrain.contracts.mesh import RankLayout
from drivetrain.seam.registry import resolve
from drivetrain.seeds import derive_seed
from drivetrain.workers.profiling import Profiler
from drivetrain.workers.registration import register


class Worker:
    """A member of a worker group. It gets names and config, and resolves plugins by itself.

    Args:
        config: of the run.
        role: the roles it plays, joined by ``_``, such as ``actor_rollout_ref``.
        rank, world_size: position among the workers of its group. Over one, the launcher has set ``MASTER_ADDR``,
            ``MASTER_PORT``, ``RANK`` and ``WORLD_SIZE``, and workers of one process share its process group.
        local_rank: index of its device among those of its node.
        timeout_s: longest wait in a collective call.
    """

    profiler: Profiler | None = None

    def __init__(
        self, config: RunConfig, role: str, *, rank: int = 0, world_size: int = 1, local_rank: int = 0,
        timeout_s: float = 1800.0,
    ) -> None:  # fmt: skip
        self.config = config
        self.roles = tuple(role.split("_"))
        self.rank, self.world_size, self.local_rank = rank, world_size, local_rank
        self.hardware: Hardware = resolve("hardware", config.hardware.name)(config.hardware)
        self.hardware.select(local_rank)
        self.memory: dict[str, float] = {}
        self._owns_process_group = world_size > 1 and self._join(timeout_s)
        self.hardware.seed(derive_seed(config.trainer.seed, "worker", role, rank))

    def _join(self, timeout_s: float) -> bool:
        """Initialise the process group; whether this worker is the one in its process that did."""
        import torch.distributed as dist

        if dist.is_initialized():
            return False
        dist.init_process_group(self.hardware.communication_backend, timeout=timedelta(seconds=timeout_s))
        return True

    @register()
    def take_memory(self) -> Mapping[str, float]:
        """The largest figures of the device's memory since the last call, by metric."""
        taken, self.memory = self.memory, {}
        return taken

    @register()
    def prepare_profile(self) -> None:
        """Get ready to profile as the config says.

        Raises:
            UserError: this hardware has no such tool.
        """
        assert self.config.profiler is not None
        self.profiler = Profiler(self, self.config.profiler)

    @register()
    def start_profile(self, name: str) -> None:
        """Profile from here, if ``profiler.ranks`` has this rank; files are called ``<name>-rank-<rank>``."""
        assert self.profiler is not None
        self.profiler.start(name)

    @register()
    def stop_profile(self) -> None:
        """End the profile and write its files."""
        assert self.profiler is not None
        self.profiler.stop()

    def layout(self, mesh: str) -> RankLayout:
        """Where this rank stands in a mesh; here, one of ``world_size`` data-parallel ranks."""
        return RankLayout(dp=self.rank, dp_size=self.world_size)

    def close(self) -> None:
        """Let go of devices, files and the process group; write the profile of a step that did not end."""
        if self.profiler is not None:
            self.profiler.stop()
        if self._owns_process_group:
            import torch.distributed as dist

            dist.destroy_process_group()
            self._owns_process_group = False
