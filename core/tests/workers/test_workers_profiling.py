"""A profile: what is put into ranges when, for which ranks, and what becomes of its files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from drivetrain.builtin.cpu import CPU
from drivetrain.config import PluginConfig, ProfilerConfig
from drivetrain.errors import UserError
from drivetrain.workers import register
from drivetrain.workers.profiling import Profiler


class Device(CPU):
    """A host that has what only accelerators have; keeps what it is told."""

    def __init__(self) -> None:
        super().__init__(PluginConfig(name="device"))
        self.told: list[str] = []

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        self.told.append(f"<{name}")
        yield
        self.told.append(f"{name}>")

    @contextmanager
    def profiler(self) -> Iterator[None]:
        self.told.append("start")
        yield
        self.told.append("stop")

    @contextmanager
    def memory_history(self, file: Path) -> Iterator[None]:
        yield
        file.write_text("half")
        assert not list(file.parent.parent.glob("*.pickle")), "a file is in place before it is whole"
        file.write_text("whole")


class Adder:
    """As much of a worker as a profile touches."""

    def __init__(self, run_dir: Path, hardware: Any = None, *, rank: int = 0, **section: Any) -> None:
        self.config = SimpleNamespace(trainer=SimpleNamespace(run_dir=run_dir))
        self.hardware, self.roles, self.rank = hardware or Device(), ("actor", "ref"), rank
        self.profiler = Profiler(self, ProfilerConfig(steps=(1,), **section))  # type: ignore[arg-type]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.hardware.told.append(name)
        yield

    @register()
    def add(self, a: int, b: int) -> int:
        with self.phase("sum"):
            return a + b

    def other(self) -> None:
        """Not registered."""


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_calls_and_phases_are_ranges_while_a_profile_runs(tmp_path: Path) -> None:
    worker = Adder(tmp_path, tool="nsys")
    assert worker.add(1, 2) == 3 and worker.hardware.told == ["sum"]
    worker.profiler.start("step-1")
    assert worker.add(1, b=2) == 3
    worker.other()
    worker.profiler.stop()
    told = ["start", "<actor_ref.add", "<sum", "sum", "sum>", "actor_ref.add>", "stop"]
    assert worker.hardware.told[1:] == told
    assert not {"add", "phase"} & vars(worker).keys(), "the methods are the class's own again"
    worker.profiler.stop()
    assert worker.hardware.told[1:] == told and files(tmp_path) == []


@pytest.mark.parametrize(("ranks", "chosen"), [((0,), False), ((0, 3), True), ("all", True)])
def test_ranks_that_are_not_chosen_do_nothing(tmp_path: Path, ranks: Any, chosen: bool) -> None:
    worker = Adder(tmp_path, rank=3, tool="nsys", ranks=ranks)
    worker.profiler.start("step-1")
    worker.add(1, 2)
    worker.profiler.stop()
    assert ("start" in worker.hardware.told) is ("<sum" in worker.hardware.told) is chosen


def test_a_file_is_in_place_when_it_is_whole(tmp_path: Path) -> None:
    worker = Adder(tmp_path, tool="memory", folder="mem", rank=2, ranks="all")
    worker.profiler.start("step-7-critic")
    worker.profiler.stop()
    assert [path.name for path in (tmp_path / "mem").iterdir()] == ["step-7-critic-rank-2.pickle"]
    assert (tmp_path / "mem" / "step-7-critic-rank-2.pickle").read_text() == "whole"


def test_workers_of_one_process_have_one_profile(tmp_path: Path) -> None:
    first, second = Adder(tmp_path, tool="nsys"), Adder(tmp_path, tool="nsys")
    for worker in (first, second):
        worker.profiler.start("step-1")
    second.add(1, 2)
    for worker in (first, second):
        worker.profiler.stop()
    assert first.hardware.told == ["start", "stop"]
    assert second.hardware.told[0] == "<actor_ref.add" and "start" not in second.hardware.told
    second.profiler.start("step-2")
    assert second.hardware.told[-1] == "start"
    second.profiler.stop()


@pytest.mark.parametrize(("tool", "why"), [("nsys", "a cpu has no vendor's profiler"),
                                           ("memory", "torch keeps no history of a cpu's memory")])  # fmt: skip
def test_a_tool_that_the_hardware_has_not_is_refused_at_once(tmp_path: Path, tool: str, why: str) -> None:
    with pytest.raises(UserError, match=why) as raised:
        Adder(tmp_path, CPU(PluginConfig(name="cpu")), tool=tool)
    assert raised.value.where == "profiler.tool" and raised.value.mend == "set profiler.tool=torch"
