"""The hardware ``cuda`` on real GPUs: NVML, the driver and torch answer, nothing is simulated."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from drivetrain import PluginConfig
from drivetrain.testing import HardwareConformance
from drivetrain_hardware_cuda.cuda import CUDA

pytestmark = pytest.mark.gpu

ONE_OF_TWO = """
import sys, torch, torch.distributed as dist
from drivetrain import PluginConfig
from drivetrain_hardware_cuda.cuda import CUDA
hardware, rank = CUDA(PluginConfig(name="cuda")), int(sys.argv[1])
hardware.select(rank)
dist.init_process_group(hardware.communication_backend, init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
total = torch.full((1,), float(rank + 1), device=hardware.device())
dist.all_reduce(total)
assert total.item() == 3
dist.destroy_process_group()
print(hardware.device_uuid())
"""


class TestGPU(HardwareConformance):
    name = "cuda"


def test_every_component_is_read_and_new_enough() -> None:
    rows = {row.name: row for row in CUDA.components()}
    assert rows.keys() == {"driver", "CUDA of torch", "cuDNN", "NCCL"}
    assert {name: row.problem for name, row in rows.items() if row.problem} == {}


def test_a_reset_forgets_the_peak() -> None:
    hardware = CUDA(PluginConfig(name="cuda"))
    others = hardware.memory().allocated
    del (held := [torch.ones(1 << 26, device=hardware.device())])[:]
    assert hardware.memory().peak >= others + (1 << 28) and not held
    hardware.reset_peak()
    assert hardware.memory().peak < others + (1 << 28)


def test_a_history_of_memory_has_what_was_allocated(tmp_path: Path) -> None:
    hardware = CUDA(PluginConfig(name="cuda"))
    with hardware.profiler(), hardware.range("held"), hardware.memory_history(tmp_path / "history.pickle"):
        held = torch.ones(12345678, device=hardware.device())
    history = pickle.loads((tmp_path / "history.pickle").read_bytes())
    sizes = {event["size"] for event in history["device_traces"][hardware.device().index] if event["action"] == "alloc"}
    assert any(held.nbytes <= size < held.nbytes + 512 for size in sizes)
    assert any(frame["name"].startswith("test_a_history") for event in history["device_traces"][0]
               for frame in event.get("frames", ()))  # fmt: skip


def test_the_uuid_does_not_depend_on_what_is_visible() -> None:
    """The last GPU has the same UUID in a process that sees it alone."""
    hardware = CUDA(PluginConfig(name="cuda"))
    last = CUDA.detect() - 1
    code = (
        "from drivetrain import PluginConfig; from drivetrain_hardware_cuda.cuda import CUDA;"
        "print(CUDA(PluginConfig(name='cuda')).device_uuid())"
    )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": visible[last] if visible != [""] else str(last)}
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment)
    assert told.stdout.strip() == hardware.device_uuid(last)


@pytest.mark.skipif(CUDA.detect() < 2, reason="needs two GPUs")
def test_two_processes_meet_over_nccl_each_on_its_device(tmp_path) -> None:
    arguments = [sys.executable, "-c", ONE_OF_TWO]
    both = [subprocess.Popen([*arguments, str(rank), str(tmp_path / "meet")], stdout=subprocess.PIPE, text=True)
            for rank in (0, 1)]  # fmt: skip
    told = [process.communicate(timeout=300)[0].strip() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    hardware = CUDA(PluginConfig(name="cuda"))
    assert told == [hardware.device_uuid(0), hardware.device_uuid(1)]
