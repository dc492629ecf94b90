"""The contract of a kind of device."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from drivetrain.errors import UserError

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


@dataclass(frozen=True, kw_only=True)
class Component:
    """Something that a kind of device works with, such as its driver: a row of ``drivetrain doctor``.

    Attributes:
        found: its version; None if it is not there or cannot be asked. Only the numbers that it starts with count.
        minimum: the smallest version that works; None if any does, and if it may be absent.
        mend: what to do if that is not there.
    """

    name: str
    found: str | None
    minimum: str | None = None
    mend: str = ""

    @property
    def problem(self) -> str:
        """What is wrong with it; empty if nothing is."""
        if self.minimum is None:
            return ""
        found = _numbers(self.found or "")
        if not found:
            return f"no version can be read; {self.minimum} or newer is needed"
        return "" if found >= _numbers(self.minimum) else f"{self.minimum} or newer is needed"


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in match[0].split(".")) if match else ()


class Event(Protocol):
    """A point in a device's work; the events of torch's device modules are such."""

    def record(self) -> None:
        """Mark the point that the current stream has reached."""

    def synchronize(self) -> None:
        """Wait until the work before the point is done."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from this point to ``end``, another event of the same hardware."""


class Hardware(ABC):
    """Answers every question about devices, so that nothing else asks a vendor's module.

    A process sees all devices of its node and works on one, which :meth:`select` sets. A ``local_index`` counts the
    devices that the process sees; left out, it is the one selected (0 before that).
    """

    device_type: str  # as in torch.device(type)
    communication_backend: str  # for torch.distributed.init_process_group
    visible_devices_variable: str | None  # environment variable by which a process is told its devices
    ray_resource: str | None  # name under which Ray counts these devices
    ray_noset_variable: str | None = None  # set to "1", Ray leaves a worker all devices of its node

    def __init__(self, config: PluginConfig) -> None:
        self.config = config
        self.local_index = 0

    @classmethod
    @abstractmethod
    def detect(cls) -> int:
        """Number of devices of this kind that this process can use; 0 if none.

        Raises:
            UserError: the vendor's software is installed and does not load.
        """

    @classmethod
    def components(cls) -> Sequence[Component]:
        """What these devices work with, and its minima; empty on a machine that has nothing of this kind."""
        return ()

    def select(self, local_index: int) -> None:
        """Make a device the one that this process works on.

        Raises:
            UserError: there is no device of that index.
        """
        self.local_index = local_index

    @classmethod
    def local_index_of(cls, assigned: str) -> int:
        """Local index of the device that a scheduler calls ``assigned``: its place in the visible-devices variable.

        Raises:
            UserError: the variable does not list it.
        """
        variable = cls.visible_devices_variable or ""
        visible = [name.strip() for name in os.environ.get(variable, "").split(",") if name.strip()]
        if (assigned not in visible) if visible else (not assigned.isdigit()):
            raise UserError(
                f"device {assigned} is not visible to this process",
                where=f"{variable}={','.join(visible)}",
                mend="leave the variable to the scheduler, or unset it",
            )
        return visible.index(assigned) if visible else int(assigned)

    @abstractmethod
    def device(self, local_index: int | None = None) -> torch.device:
        """The device of that index."""

    @abstractmethod
    def device_name(self, local_index: int | None = None) -> str:
        """The vendor's name of the device."""

    @abstractmethod
    def device_uuid(self, local_index: int | None = None) -> str:
        """What tells the device from every other, alike in all processes that see it."""

    @abstractmethod
    def memory(self, local_index: int | None = None) -> DeviceMemory:
        """Memory figures, now."""

    def reset_peak(self, local_index: int | None = None) -> None:
        """Count ``peak`` of :meth:`memory` from here; hardware that cannot goes on counting from the start."""

    @abstractmethod
    def dtypes(self) -> tuple[str, ...]:
        """Names of the torch dtypes that models can be trained in."""

    @abstractmethod
    def attention(self) -> tuple[str, ...]:
        """Attention implementations that work, by transformers' names, best first for 16-bit dtypes."""

    @abstractmethod
    def rng_state(self) -> dict[str, torch.Tensor]:
        """The random state of this process on its device."""

    @abstractmethod
    def set_rng_state(self, state: dict[str, torch.Tensor]) -> None:
        """Put back what :meth:`rng_state` returned."""

    def seed(self, seed: int) -> None:
        """Seed torch's generators, those of every device among them."""
        import torch

        torch.manual_seed(seed)

    def synchronize(self) -> None:
        """Wait for the device; a CPU has nothing to wait for."""

    def stream(self) -> AbstractContextManager[Any]:
        """A context in which work goes to a stream of its own; empty without streams."""
        return nullcontext()

    @abstractmethod
    def event(self) -> Event:
        """A new event, which measures time."""

    def empty_cache(self) -> None:
        """Give cached memory back to the device."""

    def range(self, name: str) -> AbstractContextManager[Any]:
        """A context whose work the vendor's profiler shows under a name; empty without such a profiler."""
        return nullcontext()

    def profiler(self) -> AbstractContextManager[Any]:
        """A context that the vendor's profiler, started around this process, records.

        Raises:
            UserError: there is no such profiler for this hardware.
        """
        raise UserError(f"a {self.device_type} has no vendor's profiler", where="profiler.tool",
                        mend="set profiler.tool=torch")  # fmt: skip

    def memory_history(self, file: Path) -> AbstractContextManager[Any]:
        """A context whose allocations on the device are written to a file at its end, for torch's memory viewer.

        Raises:
            UserError: torch keeps no history of this hardware's memory.
        """
        raise UserError(f"torch keeps no history of a {self.device_type}'s memory", where="profiler.tool",
                        mend="set profiler.tool=torch")  # fmt: skip
