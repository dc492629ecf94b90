"""The hardware ``rocm``, simulated: torch is taken for its HIP build and no AMD GPU is asked.

``torch.version`` and ``torch.cuda`` are replaced, so that this shows which questions are asked, not what ROCm answers.
"""

from __future__ import annotations

import importlib.machinery
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from drivetrain import PluginConfig, UserError
from drivetrain.builtin import auto_hardware
from drivetrain.seam.registry import get_registry
from drivetrain.testing import SimulatedDevices
from drivetrain_hardware_rocm import rocm as module
from drivetrain_hardware_rocm.rocm import ROCm


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> SimulatedDevices:
    """Two simulated GPUs in a torch built for ROCm 6.4."""
    simulated = SimulatedDevices(
        count=2, is_bf16_supported=lambda: True, nccl=SimpleNamespace(version=lambda: (2, 22, 3))
    )
    monkeypatch.setattr(torch, "cuda", simulated)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", "6.4.43484-123eb5128")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    return simulated


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of what the kernel shows; empty: no AMD device."""
    monkeypatch.setattr(module, "COMPUTE_NODE", tmp_path / "kfd")
    monkeypatch.setattr(module, "DRIVER_VERSION", tmp_path / "version")
    return tmp_path


@pytest.fixture
def rocm(devices: SimulatedDevices) -> ROCm:
    return ROCm(PluginConfig(name="rocm"))


def test_it_is_offered_without_torch() -> None:
    code = (
        "import sys; from drivetrain.seam.registry import get_registry;"
        "assert 'rocm' in get_registry().names('hardware'); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_it_answers_the_whole_contract() -> None:
    assert not ROCm.__abstractmethods__
    assert get_registry().load("hardware", "rocm") is ROCm
    assert get_registry().select("hardware", "rocm").spec.provides == ("hardware.rocm",)  # and not hardware.cuda


def test_it_is_found_in_a_hip_build_alone(devices: SimulatedDevices, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ROCm.detect() == 2 and auto_hardware.detected_name() == "rocm"
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.version, "hip", None)
    assert ROCm.detect() == 0
    with pytest.raises(UserError, match="no rocm device: this build of torch is not for ROCm"):
        ROCm(PluginConfig(name="rocm"))


def test_a_hip_build_without_a_device_is_refused(devices: SimulatedDevices) -> None:
    devices.count = 0
    with pytest.raises(UserError, match="no rocm device: torch finds no AMD GPU"):
        ROCm(PluginConfig(name="rocm"))


def test_what_rays_manager_of_these_devices_uses() -> None:
    manager = pytest.importorskip("ray._private.accelerators.amd_gpu")
    assert ROCm.ray_noset_variable == manager.NOSET_HIP_VISIBLE_DEVICES_ENV_VAR
    assert ROCm.visible_devices_variable == manager.HIP_VISIBLE_DEVICES_ENV_VAR
    assert ROCm.ray_resource == manager.AMDGPUAcceleratorManager.get_resource_name()


def test_devices_and_memory(rocm: ROCm, devices: SimulatedDevices) -> None:
    rocm.select(1)
    assert rocm.device() == torch.device("cuda", 1) and devices.current == 1  # HIP answers under the name of CUDA
    assert (rocm.device_name(), rocm.device_uuid()) == ("Simulated 1", "GPU-0000-1")
    assert (rocm.memory().total, rocm.memory().allocated) == (devices.TOTAL, devices.ALLOCATED + 1)
    assert rocm.communication_backend == "nccl"


def test_dtypes_and_attention(rocm: ROCm, devices: SimulatedDevices, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (rocm.dtypes(), rocm.attention()) == (("float32", "bfloat16", "float16"), ("sdpa", "eager"))
    devices.is_bf16_supported = lambda: False
    assert rocm.dtypes() == ("float32", "float16")
    flash = ModuleType("flash_attn")
    flash.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None)
    monkeypatch.setitem(sys.modules, "flash_attn", flash)
    assert rocm.attention() == ("flash_attention_2", "sdpa", "eager")


def test_components_are_held_against_their_minima(
    devices: SimulatedDevices, kernel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (kernel / "version").write_text("6.12.12\n")
    assert [(row.name, row.found, row.problem) for row in ROCm.components()] == [
        ("driver", "6.12.12", ""), ("ROCm of torch", "6.4.43484-123eb5128", ""), ("RCCL", "2.22.3", ""),
    ]  # fmt: skip
    (kernel / "version").unlink()
    monkeypatch.setattr(torch.version, "hip", "6.1.40091")
    rows = {row.name: row for row in ROCm.components()}
    assert (rows["driver"].found, rows["driver"].problem) == (None, "")
    assert rows["ROCm of torch"].problem == "6.2 or newer is needed"


def test_a_machine_with_a_device_and_torch_for_the_cpu(kernel: Path) -> None:
    assert ROCm.components() == ()
    (kernel / "kfd").touch()
    assert [(row.name, bool(row.problem)) for row in ROCm.components()] == [("driver", False), ("ROCm of torch", True)]


def test_ranges_and_profiles_go_by_the_names_of_cuda(rocm: ROCm, devices: SimulatedDevices) -> None:
    devices.nvtx = SimpleNamespace(range=lambda name: nullcontext(f"range {name}"))
    devices.profiler = SimpleNamespace(profile=lambda: nullcontext("profile"))
    with rocm.profiler() as profile, rocm.range("update") as update:
        assert (profile, update) == ("profile", "range update")
