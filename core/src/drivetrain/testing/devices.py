"""What every hardware has to satisfy on its own devices, and devices to test with where there are none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from drivetrain.config import PluginConfig
from drivetrain.contracts import Hardware
from drivetrain.seam.registry import get_registry


class HardwareConformance:
    """Subclass it and set ``name`` to a hardware that this machine has; it works on the real devices."""

    name: ClassVar[str]

    def hardware(self) -> Hardware:
        """A new object of the hardware."""
        made: Hardware = get_registry().load("hardware", self.name)(PluginConfig(name=self.name))
        return made

    def test_devices_are_told_apart(self) -> None:
        """Every local index is a device with a name and a UUID of its own, and can be selected."""
        hardware, count = self.hardware(), self.hardware().detect()
        assert count >= 1
        assert len({hardware.device_uuid(index) for index in range(count)}) == count
        for index in reversed(range(count)):
            hardware.select(index)
            assert hardware.device() == hardware.device(index) == torch.ones(1, device=hardware.device()).device
            assert hardware.device().type == hardware.device_type
            assert hardware.device_name() and hardware.device_uuid() == hardware.device_uuid(index)

    def test_memory_figures(self) -> None:
        """Free memory is part of all, and the peak is at least what is allocated, also after a reset."""
        hardware = self.hardware()
        held = torch.ones(1 << 20, device=hardware.device())
        hardware.reset_peak()
        memory = hardware.memory()
        assert 0 <= memory.free <= memory.total and held.nbytes <= memory.allocated <= memory.peak <= memory.total
        hardware.empty_cache()

    def test_random_state_can_be_put_back(self) -> None:
        """The same draws follow the same state, on host and device; a seed sets both."""
        hardware = self.hardware()
        hardware.seed(3)
        first, state, then = self._draw(hardware), hardware.rng_state(), self._draw(hardware)
        hardware.set_rng_state(state)
        assert self._draw(hardware) == then != first
        hardware.seed(3)
        assert self._draw(hardware) == first

    def test_streams_and_events(self) -> None:
        """Work on a stream of its own sees the work before it, and is seen by the work after it."""
        hardware = self.hardware()
        start, end = hardware.event(), hardware.event()
        start.record()
        value = torch.full((256, 256), 2.0, device=hardware.device())
        with hardware.stream():
            value = value @ value
        total = (value + 1).sum()
        end.record()
        end.synchronize()
        hardware.synchronize()
        assert total.item() == 256 * 256 * 1025 and start.elapsed_time(end) >= 0

    def test_dtypes_and_attention(self) -> None:
        """Gradients flow in every dtype that is claimed, and transformers' plain attentions are among the choices."""
        hardware = self.hardware()
        for name in hardware.dtypes():
            weight = torch.ones(4, 4, dtype=getattr(torch, name), device=hardware.device(), requires_grad=True)
            (weight @ weight).sum().backward()
            assert weight.grad is not None and weight.grad.eq(8).all(), name
        assert {"sdpa", "eager"} <= set(hardware.attention())

    def _draw(self, hardware: Hardware) -> list[list[float]]:
        return [torch.rand(2).tolist(), torch.rand(2, device=hardware.device()).tolist()]


class SimulatedDevices:
    """The surface that torch's device modules have in common, with bookkeeping in place of devices.

    It shows that a plugin asks the right questions, not that a device answers them. A question that is not part of the
    surface raises AttributeError; further ones are given as keyword arguments.
    """

    TOTAL: ClassVar[int] = 64 << 30
    ALLOCATED: ClassVar[int] = 3 << 30
    PEAK: ClassVar[int] = 7 << 30

    def __init__(self, count: int = 2, **further: Any) -> None:
        self.count, self.current = count, 0
        self.peaks = [self.PEAK] * count
        self.states = [torch.tensor([index], dtype=torch.uint8) for index in range(count)]
        self.log: list[str] = []
        vars(self).update(further)

    def is_available(self) -> bool:
        return self.count > 0

    def device_count(self) -> int:
        return self.count

    def set_device(self, device: int) -> None:
        self.current = self._index(device)

    def get_device_name(self, device: int) -> str:
        return f"Simulated {self._index(device)}"

    def get_device_properties(self, device: int) -> SimpleNamespace:
        return SimpleNamespace(uuid=f"0000-{self._index(device)}")

    def mem_get_info(self, device: int) -> tuple[int, int]:
        return self.TOTAL - self.PEAK - self._index(device), self.TOTAL

    def memory_allocated(self, device: int) -> int:
        return self.ALLOCATED + self._index(device)

    def max_memory_allocated(self, device: int) -> int:
        return self.peaks[self._index(device)]

    def reset_peak_memory_stats(self, device: int) -> None:
        self.peaks[self._index(device)] = self.memory_allocated(device)

    def get_rng_state(self, device: int) -> torch.Tensor:
        return self.states[self._index(device)].clone()

    def set_rng_state(self, state: torch.Tensor, device: int) -> None:
        self.states[self._index(device)] = state.clone()

    def synchronize(self, device: int) -> None:
        self.log.append(f"synchronize {self._index(device)}")

    def empty_cache(self) -> None:
        self.log.append("empty_cache")

    def current_stream(self, device: int) -> SimpleNamespace:
        return self._stream(f"current {self._index(device)}")

    def Stream(self, device: int) -> SimpleNamespace:
        return self._stream(f"own {self._index(device)}")

    @contextmanager
    def stream(self, stream: SimpleNamespace) -> Iterator[None]:
        self.log.append(f"enter {stream.name}")
        yield
        self.log.append(f"leave {stream.name}")

    def Event(self, *, enable_timing: bool) -> SimpleNamespace:
        return SimpleNamespace(enable_timing=enable_timing)

    def _stream(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(name=name, wait_stream=lambda other: self.log.append(f"{name} waits for {other.name}"))

    def _index(self, device: Any) -> int:
        index: int = getattr(device, "index", device)
        assert 0 <= index < self.count, f"invalid device ordinal {index}"
        return index
