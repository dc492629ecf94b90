"""The hardware ``ascend``, simulated: an object stands for ``torch_npu``, and no NPU is asked.

This shows which questions are asked, not what torch_npu and CANN answer.
"""

from __future__ import annotations

import importlib.machinery
import platform
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from drivetrain import PluginConfig, UserError
from drivetrain.builtin import auto_hardware
from drivetrain.seam.registry import get_registry
from drivetrain.testing import SimulatedDevices
from drivetrain_hardware_ascend import ascend as module
from drivetrain_hardware_ascend.ascend import Ascend

TORCH = ".".join(torch.__version__.split(".")[:2])


@pytest.fixture
def npus(monkeypatch: pytest.MonkeyPatch) -> SimulatedDevices:
    """Two simulated NPUs, and a ``torch_npu`` of torch's version with CANN 8.5."""
    simulated = SimulatedDevices(count=2, is_bf16_supported=lambda: True)
    versions = {"CANN": "8.5.0", "DRIVER": "25.3.rc1"}
    extension = ModuleType("torch_npu")
    extension.__spec__ = importlib.machinery.ModuleSpec("torch_npu", None)
    extension.__version__ = f"{TORCH}.0.post1"
    extension.npu = simulated
    extension.utils = SimpleNamespace(get_cann_version=lambda module: versions[module], versions=versions)
    monkeypatch.setitem(sys.modules, "torch_npu", extension)
    monkeypatch.setattr(torch, "npu", simulated, raising=False)
    # "npu" becomes a device type of torch's when the real torch_npu registers it, for good
    monkeypatch.setattr(torch, "device", lambda kind, index: SimpleNamespace(type=kind, index=index))
    monkeypatch.setattr(torch.version, "cuda", None)  # the machine of the test may have a GPU
    monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)
    return simulated


@pytest.fixture
def ascend(npus: SimulatedDevices) -> Ascend:
    return Ascend(PluginConfig(name="ascend"))


def test_it_is_offered_without_torch() -> None:
    code = (
        "import sys; from drivetrain.seam.registry import get_registry;"
        "assert 'ascend' in get_registry().names('hardware'); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_it_answers_the_whole_contract() -> None:
    assert not Ascend.__abstractmethods__
    assert get_registry().load("hardware", "ascend") is Ascend
    assert get_registry().select("hardware", "ascend").spec.provides == ("hardware.ascend",)


def test_it_is_found_through_torch_npu(npus: SimulatedDevices) -> None:
    assert Ascend.detect() == 2 and auto_hardware.detected_name() == "ascend"
    npus.count = 0
    with pytest.raises(UserError, match="no ascend device: torch_npu finds no NPU"):
        Ascend(PluginConfig(name="ascend"))


def test_a_machine_without_torch_npu_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    assert Ascend.detect() == 0
    with pytest.raises(UserError, match="no ascend device: torch_npu is not installed"):
        Ascend(PluginConfig(name="ascend"))


def test_a_torch_npu_that_does_not_load_is_no_absence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``auto`` says so, and does not go on to the CPU."""
    (tmp_path / "torch_npu.py").write_text("raise ImportError('libhccl.so: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match="torch_npu is installed and does not load: libhccl.so"):
        auto_hardware.detected_name()


def test_what_rays_manager_of_these_devices_uses() -> None:
    manager = pytest.importorskip("ray._private.accelerators.npu")
    assert Ascend.ray_noset_variable == manager.NOSET_ASCEND_RT_VISIBLE_DEVICES_ENV_VAR
    assert Ascend.visible_devices_variable == manager.ASCEND_RT_VISIBLE_DEVICES_ENV_VAR
    assert Ascend.ray_resource == manager.NPUAcceleratorManager.get_resource_name()


def test_devices_and_memory(ascend: Ascend, npus: SimulatedDevices) -> None:
    ascend.select(1)
    assert (ascend.device().type, ascend.device().index, npus.current) == ("npu", 1, 1)
    assert ascend.device_name() == "Simulated 1"
    assert (ascend.memory().total, ascend.memory().allocated) == (npus.TOTAL, npus.ALLOCATED + 1)
    assert ascend.rng_state()["npu"].tolist() == [1] and ascend.communication_backend == "hccl"


def test_a_uuid_is_that_of_the_npu_whatever_is_visible(ascend: Ascend, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = [ascend.device_uuid(index) for index in (0, 1)]
    assert whole == [f"NPU-{platform.node()}-0", f"NPU-{platform.node()}-1"]
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "1, 5")
    assert [ascend.device_uuid(0), ascend.device_uuid(1)] == [whole[1], f"NPU-{platform.node()}-5"]
    assert ascend.local_index_of("5") == 1


def test_dtypes_and_attention(ascend: Ascend, npus: SimulatedDevices) -> None:
    assert ascend.dtypes() == ("float32", "bfloat16", "float16")
    assert ascend.attention() == ("flash_attention_2", "sdpa", "eager")
    npus.is_bf16_supported = lambda: False
    assert ascend.dtypes() == ("float32", "float16")


def test_components_are_held_against_their_minima(npus: SimulatedDevices) -> None:
    assert [(row.name, row.found, row.problem) for row in Ascend.components()] == [
        ("torch_npu", f"{TORCH}.0.post1", ""), ("CANN", "8.5.0", ""), ("driver", "25.3.rc1", ""),
    ]  # fmt: skip
    extension = sys.modules["torch_npu"]
    extension.__version__ = "2.8.0"
    extension.utils.versions.update(CANN="8.3.RC1", DRIVER="")
    assert [(row.name, row.problem) for row in Ascend.components()] == [
        ("torch_npu", f"{TORCH} or newer is needed"), ("CANN", "8.5 or newer is needed"), ("driver", ""),
    ]  # fmt: skip
    extension.utils.versions.update(CANN="")  # what torch_npu says of a CANN before 8.1
    assert Ascend.components()[1].problem == "no version can be read; 8.5 or newer is needed"


def test_an_npu_without_torch_npu_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DEVICE_NODES", tmp_path)
    assert Ascend.components() == ()
    (tmp_path / "davinci_manager").touch()
    assert Ascend.components() == ()
    (tmp_path / "davinci0").touch()
    assert [(row.name, bool(row.problem)) for row in Ascend.components()] == [("torch_npu", True)]
