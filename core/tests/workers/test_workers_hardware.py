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
from drivetrain.contracts import Component
from drivetrain.errors import UserError
from drivetrain.seam.registry import get_registry
from drivetrain.testing import HardwareConformance

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


class TestCPU(HardwareConformance):
    name = "cpu"


def test_the_cpu_says_what_it_is(cpu: CPU) -> None:
    memory = cpu.memory()
    assert memory.total > memory.free >= 0 and memory.total > memory.peak >= 2**20
    assert cpu.detect() == 1 and cpu.device(3) == torch.device("cpu") and cpu.ray_resource is None
    assert cpu.components() == () and cpu.ray_noset_variable is None


class Chips(CPU):
    visible_devices_variable = "CHIPS"


@pytest.mark.parametrize(("visible", "assigned", "index"), [(None, "3", 3), ("", "1", 1), ("4, 6", "6", 1),
                                                            ("GPU-a,GPU-b", "GPU-a", 0)])  # fmt: skip
def test_a_scheduler_counts_all_devices_and_a_process_those_it_sees(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, assigned: str, index: int
) -> None:
    monkeypatch.delenv("CHIPS", raising=False)
    if visible is not None:
        monkeypatch.setenv("CHIPS", visible)
    assert Chips.local_index_of(assigned) == index


def test_a_device_that_is_not_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHIPS", "4,6")
    with pytest.raises(UserError, match=r"device 5 is not visible to this process \(CHIPS=4,6\)"):
        Chips.local_index_of("5")
    monkeypatch.delenv("CHIPS")
    with pytest.raises(UserError, match="device GPU-a is not visible"):
        Chips.local_index_of("GPU-a")


@pytest.mark.parametrize(
    ("found", "minimum", "problem"),
    [
        ("9.10.2", "9.10", ""),
        ("9.9.9", "9.10", "9.10 or newer is needed"),
        ("6.2.41133-dd7f95766", "6.2", ""),
        ("9", "9.10", "9.10 or newer is needed"),
        ("unknown", "9.10", "no version can be read; 9.10 or newer is needed"),
        (None, "9.10", "no version can be read; 9.10 or newer is needed"),
        (None, None, ""),
    ],
)
def test_a_version_is_held_against_its_minimum(found: str | None, minimum: str | None, problem: str) -> None:
    assert Component(name="driver", found=found, minimum=minimum).problem == problem
