"""The hardware that every machine has."""

from __future__ import annotations

import os
import platform
import resource
from pathlib import Path
from typing import TYPE_CHECKING

from drivetrain.contracts.hardware import DeviceMemory, Hardware

if TYPE_CHECKING:
    import torch


class CPU(Hardware):
    """The host's processor, over gloo."""

    device_type = "cpu"
    communication_backend = "gloo"
    visible_devices_variable = None
    ray_resource = None

    @classmethod
    def detect(cls) -> int:
        return 1

    def device(self, local_index: int = 0) -> torch.device:
        import torch

        return torch.device("cpu")

    def device_name(self, local_index: int = 0) -> str:
        info = Path("/proc/cpuinfo")
        names = [line.partition(":")[2].strip() for line in info.read_text().splitlines()
                 if line.startswith("model name")] if info.exists() else []  # fmt: skip
        return names[0] if names else platform.processor() or platform.machine()

    def memory(self, local_index: int = 0) -> DeviceMemory:
        page = os.sysconf("SC_PAGE_SIZE")
        usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peak = usage if platform.system() == "Darwin" else usage * 1024
        available = "SC_AVPHYS_PAGES" in os.sysconf_names
        return DeviceMemory(
            total=page * os.sysconf("SC_PHYS_PAGES"),
            free=page * os.sysconf("SC_AVPHYS_PAGES") if available else 0,
            allocated=peak,
            peak=peak,
        )

    def dtypes(self) -> tuple[str, ...]:
        return ("float32", "bfloat16")

    def attention(self) -> tuple[str, ...]:
        return ("sdpa", "eager")

    def rng_state(self) -> dict[str, torch.Tensor]:
        import torch

        return {"cpu": torch.get_rng_state()}

    def set_rng_state(self, state: dict[str, torch.Tensor]) -> None:
        import torch

        torch.set_rng_state(state["cpu"])
