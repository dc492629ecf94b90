"""The hardware that every machine has."""

from __future__ import annotations

import os
import platform
import resource
import time
from pathlib import Path
from typing import TYPE_CHECKING

from drivetrain.contracts.hardware import DeviceMemory, Event, Hardware

if TYPE_CHECKING:
    import torch


class HostEvent:
    """A point in time: work of the host is done when the next line runs."""

    def record(self) -> None:
        self.recorded = time.perf_counter()

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def elapsed_time(self, end: HostEvent) -> float:
        return 1e3 * (end.recorded - self.recorded)


class CPU(Hardware):
    """The host's processor, over gloo; all local indices are the one host."""

    device_type = "cpu"
    communication_backend = "gloo"
    visible_devices_variable = None
    ray_resource = None

    @classmethod
    def detect(cls) -> int:
        return 1

    def device(self, local_index: int | None = None) -> torch.device:
        import torch

        return torch.device("cpu")

    def device_name(self, local_index: int | None = None) -> str:
        info = Path("/proc/cpuinfo")
        names = [line.partition(":")[2].strip() for line in info.read_text().splitlines()
                 if line.startswith("model name")] if info.exists() else []  # fmt: skip
        return names[0] if names else platform.processor() or platform.machine()

    def device_uuid(self, local_index: int | None = None) -> str:
        return f"CPU-{platform.node()}"

    def memory(self, local_index: int | None = None) -> DeviceMemory:
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

    def event(self) -> Event:
        return HostEvent()
