"""The contract of a kind of device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from drivetrain.config import PluginConfig


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """Bytes of one device's memory (the host's, for a CPU)."""

    total: int
    free: int
    allocated: int
    peak: int


class Hardware(ABC):
    """Answers every question about devices, so that nothing else asks a vendor's module."""

    device_type: str  # as in torch.device(type)
    communication_backend: str  # for torch.distributed.init_process_group
    visible_devices_variable: str | None  # environment variable by which a process is told its devices
    ray_resource: str | None  # name under which Ray counts these devices

    def __init__(self, config: PluginConfig) -> None:
        self.config = config

    @classmethod
    @abstractmethod
    def detect(cls) -> int:
        """Number of devices of this kind that this process can use; 0 if none. Never raises."""

    @abstractmethod
    def device(self, local_index: int = 0) -> torch.device:
        """The device of that index."""

    @abstractmethod
    def device_name(self, local_index: int = 0) -> str:
        """The vendor's name of the device."""

    @abstractmethod
    def memory(self, local_index: int = 0) -> DeviceMemory:
        """Memory figures, now."""

    @abstractmethod
    def dtypes(self) -> tuple[str, ...]:
        """Names of the torch dtypes that models can be trained in."""

    @abstractmethod
    def attention(self) -> tuple[str, ...]:
        """Attention implementations that work, best first."""

    @abstractmethod
    def rng_state(self) -> dict[str, torch.Tensor]:
        """The random state of this process on this hardware."""

    @abstractmethod
    def set_rng_state(self, state: dict[str, torch.Tensor]) -> None:
        """Put back what :meth:`rng_state` returned."""

    def seed(self, seed: int) -> None:
        """Seed torch's generators."""
        import torch

        torch.manual_seed(seed)

    def synchronize(self) -> None:
        """Wait for the device; a CPU has nothing to wait for."""

    def stream(self) -> AbstractContextManager[Any]:
        """A context in which work goes to a stream of its own; empty without streams."""
        return nullcontext()

    def empty_cache(self) -> None:
        """Give cached memory back to the device."""
