"""The hardware ``cpu``, and how ``auto`` chooses."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "driver"))
sys.path.insert(0, str(Path(__file__).parents[1] / "seam"))

from little_distributions import Site
from only_installed import only_installed

from drivetrain.builtin import auto_hardware
from drivetrain.builtin.cpu import CPU
from drivetrain.config import PluginConfig
from drivetrain.errors import UserError
from drivetrain.seam.registry import get_registry

PLUGIN = """
    from drivetrain import HardwareSpec, hookimpl

    @hookimpl
    def drivetrain_hardware():
        yield HardwareSpec(name="{name}", summary="", factory="{package}.work:Chip", config="{package}.work:ChipConfig")
"""
CHIP = """
    from drivetrain import PluginConfig
    from drivetrain.builtin.cpu import CPU

    class ChipConfig(PluginConfig):
        streams: int = 4

    class Chip(CPU):
        @classmethod
        def detect(cls):
            return %d
"""


@pytest.fixture
def detected(tmp_path: Path) -> Iterator:
    """The hardware that ``auto`` chooses on a machine with so many devices of each kind."""
    with only_installed(tmp_path / "site"):
        site = Site(tmp_path / "site")

        def choose(**kinds: int) -> CPU:
            for name, count in kinds.items():
                site.add(f"acme-{name}", PLUGIN, files={"work.py": CHIP % count})
            get_registry.cache_clear()
            return auto_hardware.detect(PluginConfig(name="auto"))

        yield choose
        site.forget()


def test_auto_takes_the_accelerator_that_is_there(detected) -> None:
    chosen = detected(quick=0, swift=2)
    assert type(chosen).__module__ == "acme_swift.work"
    assert (chosen.config.name, chosen.config.streams) == ("swift", 4)


def test_auto_takes_the_cpu_where_there_is_no_accelerator(detected) -> None:
    assert type(detected(quick=0)) is CPU


def test_auto_does_not_choose_between_two_kinds_of_accelerator(detected) -> None:
    with pytest.raises(UserError, match="quick, swift") as raised:
        detected(swift=1, quick=8)
    assert "hardware.name=quick" in str(raised.value)


@pytest.fixture
def cpu() -> CPU:
    return CPU(PluginConfig(name="cpu"))


def test_the_cpu_says_what_it_is(cpu: CPU) -> None:
    memory = cpu.memory()
    assert memory.total > memory.free >= 0 and memory.total > memory.peak >= 2**20
    assert cpu.detect() == 1 and cpu.device() == torch.device("cpu") and cpu.device_name()
    assert all(hasattr(torch, dtype) for dtype in cpu.dtypes()) and cpu.ray_resource is None
    with cpu.stream():
        cpu.synchronize()


def test_the_random_state_of_the_cpu_can_be_put_back(cpu: CPU) -> None:
    cpu.seed(3)
    first = torch.rand(2)
    state = cpu.rng_state()
    second = torch.rand(2)
    cpu.set_rng_state(state)
    assert torch.rand(2).equal(second)
    cpu.seed(3)
    assert torch.rand(2).equal(first)
