"""Hardware behind one of torch's device modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from drivetrain.contracts.hardware import DeviceMemory, Event, Hardware
from drivetrain.errors import UserError

if TYPE_CHECKING:
    import torch

    from drivetrain.config import PluginConfig


class TorchAccelerator(Hardware):
    """All that the modules ``torch.<device_type>`` answer alike, whoever the vendor is."""

    def __init__(self, config: PluginConfig) -> None:
        """Raises UserError when this process has no such device."""
        super().__init__(config)
        if not self.detect():
            raise UserError(f"no {config.name} device: {self.absence()}", where="hardware.name",
                            mend="use a machine that has one, with torch for it, or set hardware.name=cpu")  # fmt: skip
        import torch

        self.torch_module: Any = getattr(torch, self.device_type)

    @classmethod
    def absence(cls) -> str:
        """Why :meth:`detect` returns 0."""
        return "torch finds none"

    def select(self, local_index: int) -> None:
        if not 0 <= local_index < self.detect():
            raise UserError(f"no {self.config.name} device has index {local_index}: this process sees {self.detect()}",
                            where=self.visible_devices_variable or "hardware",
                            mend="start no more workers on a node than it has devices")  # fmt: skip
        self.torch_module.set_device(local_index)
        super().select(local_index)

    def device(self, local_index: int | None = None) -> torch.device:
        import torch

        return torch.device(self.device_type, self._index(local_index))

    def device_name(self, local_index: int | None = None) -> str:
        return str(self.torch_module.get_device_name(self._index(local_index)))

    def memory(self, local_index: int | None = None) -> DeviceMemory:
        index = self._index(local_index)
        free, total = self.torch_module.mem_get_info(index)
        return DeviceMemory(
            total=total,
            free=free,
            allocated=self.torch_module.memory_allocated(index),
            peak=self.torch_module.max_memory_allocated(index),
        )

    def reset_peak(self, local_index: int | None = None) -> None:
        self.torch_module.reset_peak_memory_stats(self._index(local_index))

    def rng_state(self) -> dict[str, torch.Tensor]:
        import torch

        return {"cpu": torch.get_rng_state(), self.device_type: self.torch_module.get_rng_state(self.local_index)}

    def set_rng_state(self, state: dict[str, torch.Tensor]) -> None:
        import torch

        torch.set_rng_state(state["cpu"])
        self.torch_module.set_rng_state(state[self.device_type], self.local_index)

    def synchronize(self) -> None:
        self.torch_module.synchronize(self.local_index)

    @contextmanager
    def stream(self) -> Iterator[Any]:
        """Work inside goes to a stream of its own, which starts after and ends before the work around it."""
        around, own = self.torch_module.current_stream(self.local_index), self.torch_module.Stream(self.local_index)
        own.wait_stream(around)
        with self.torch_module.stream(own):
            yield own
        around.wait_stream(own)

    def event(self) -> Event:
        return cast(Event, self.torch_module.Event(enable_timing=True))

    def empty_cache(self) -> None:
        self.torch_module.empty_cache()

    @contextmanager
    def memory_history(self, file: Path) -> Iterator[None]:
        """The allocations inside, with the Python stack of each; of more than 100,000 events the last ones."""
        memory = self.torch_module.memory
        memory._record_memory_history(stacks="python", max_entries=100_000)
        try:
            yield
        finally:
            memory._dump_snapshot(str(file))
            memory._record_memory_history(enabled=None)

    def _index(self, local_index: int | None) -> int:
        return self.local_index if local_index is None else local_index
