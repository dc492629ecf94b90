"""The hardware ``cuda`` on machines without a GPU: ``torch.cuda`` and NVML are simulated, no device is asked."""

from __future__ import annotations

import ctypes
import importlib.machinery
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from drivetrain import PluginConfig, UserError
from drivetrain.seam.registry import get_registry
from drivetrain.testing import SimulatedDevices
from drivetrain_hardware_cuda.cuda import CUDA, cudnn_version, driver_version


class NVML:
    """The library ``libnvidia-ml.so.1`` of a driver of that version."""

    def __init__(self, version: bytes, init: int = 0, told: int = 0) -> None:
        self.version, self.init, self.told, self.open = version, init, told, False

    def nvmlInit_v2(self) -> int:
        self.open = self.init == 0
        return self.init

    def nvmlSystemGetDriverVersion(self, buffer: ctypes.Array, size: ctypes.c_uint) -> int:
        assert self.open and size.value == 80
        buffer.value = self.version
        return self.told

    def nvmlShutdown(self) -> int:
        self.open = False
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch):
    def install(library: NVML | None) -> None:
        def load(name: str) -> NVML:
            assert name == "libnvidia-ml.so.1"
            if library is None:
                raise OSError("cannot open shared object file")
            return library

        monkeypatch.setattr(ctypes, "CDLL", load)

    install(None)
    return install


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> SimulatedDevices:
    """Two simulated GPUs of compute capability 9.0 and 7.0, in a torch built for CUDA 12.8."""
    simulated = SimulatedDevices(
        count=2,
        get_device_capability=lambda device: ((9, 0), (7, 0))[device.index],
        nccl=SimpleNamespace(version=lambda: (2, 27, 5)),
    )
    monkeypatch.setattr(torch, "cuda", simulated)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    return simulated


@pytest.fixture
def cuda(devices: SimulatedDevices) -> CUDA:
    return CUDA(PluginConfig(name="cuda"))


def test_it_is_offered_without_torch() -> None:
    code = (
        "import sys; from drivetrain.seam.registry import get_registry;"
        "assert 'cuda' in get_registry().names('hardware'); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_run_without_a_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert CUDA.detect() == 0
    with pytest.raises(UserError, match="no cuda device: this build of torch is not for CUDA"):
        monkeypatch.setattr(torch.version, "cuda", None)
        CUDA(PluginConfig(name="cuda"))
    with pytest.raises(UserError, match="no cuda device: torch finds no NVIDIA GPU"):
        monkeypatch.setattr(torch.version, "cuda", "12.8")
        CUDA(PluginConfig(name="cuda"))


def test_a_rocm_build_is_not_taken_for_cuda(devices: SimulatedDevices, monkeypatch: pytest.MonkeyPatch) -> None:
    assert CUDA.detect() == 2
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", "6.4.43484")
    assert CUDA.detect() == 0


def test_it_answers_the_whole_contract() -> None:
    assert not CUDA.__abstractmethods__
    assert get_registry().load("hardware", "cuda") is CUDA
    assert get_registry().select("hardware", "cuda").spec.provides == ("hardware.cuda",)


def test_what_rays_manager_of_these_devices_uses() -> None:
    manager = pytest.importorskip("ray._private.accelerators.nvidia_gpu")
    assert CUDA.ray_noset_variable == manager.NOSET_CUDA_VISIBLE_DEVICES_ENV_VAR
    assert CUDA.visible_devices_variable == manager.CUDA_VISIBLE_DEVICES_ENV_VAR
    assert CUDA.ray_resource == manager.NvidiaGPUAcceleratorManager.get_resource_name()


def test_a_selected_device_is_the_one_that_answers(cuda: CUDA, devices: SimulatedDevices) -> None:
    assert cuda.device() == torch.device("cuda", 0)
    cuda.select(1)
    assert devices.current == 1 and cuda.device() == torch.device("cuda", 1)
    assert (cuda.device_name(), cuda.device_uuid(), cuda.device_uuid(0)) == ("Simulated 1", "GPU-0000-1", "GPU-0000-0")
    cuda.synchronize()
    cuda.empty_cache()
    assert devices.log == ["synchronize 1", "empty_cache"]
    with pytest.raises(UserError, match="no cuda device has index 2: this process sees 2"):
        cuda.select(2)
    assert cuda.local_index == 1


def test_memory_figures_of_each_device(cuda: CUDA, devices: SimulatedDevices) -> None:
    memory = cuda.memory(1)
    assert (memory.total, memory.free) == (devices.TOTAL, devices.TOTAL - devices.PEAK - 1)
    assert (memory.allocated, memory.peak) == (devices.ALLOCATED + 1, devices.PEAK)
    cuda.reset_peak(1)
    assert (cuda.memory(1).peak, cuda.memory(0).peak) == (devices.ALLOCATED + 1, devices.PEAK)


def test_the_random_state_is_that_of_the_selected_device(cuda: CUDA, devices: SimulatedDevices) -> None:
    cuda.select(1)
    state = cuda.rng_state()
    assert state.keys() == {"cpu", "cuda"} and state["cuda"].tolist() == [1]
    expected = torch.rand(2)
    devices.states = [torch.tensor([7], dtype=torch.uint8)] * 2
    cuda.set_rng_state(state)
    assert [one.tolist() for one in devices.states] == [[7], [1]] and torch.rand(2).equal(expected)


def test_a_stream_of_its_own_waits_and_is_waited_for(cuda: CUDA, devices: SimulatedDevices) -> None:
    cuda.select(1)
    with cuda.stream() as own:
        assert own.name == "own 1"
    assert devices.log == ["own 1 waits for current 1", "enter own 1", "leave own 1", "current 1 waits for own 1"]
    assert cuda.event().enable_timing is True


def test_ranges_and_profiles_are_those_of_nsight_systems(cuda: CUDA, devices: SimulatedDevices) -> None:
    devices.nvtx = SimpleNamespace(range=lambda name: told(devices, name))
    devices.profiler = SimpleNamespace(profile=lambda: told(devices, "profile"))
    with cuda.profiler(), cuda.range("update"):
        pass
    assert devices.log == ["profile", "update", "update ends", "profile ends"]


def test_a_history_of_memory_is_written_also_of_what_failed(
    cuda: CUDA, devices: SimulatedDevices, tmp_path: Path
) -> None:
    devices.memory = SimpleNamespace(
        _record_memory_history=lambda enabled="all", **options: devices.log.append(f"record {enabled}"),
        _dump_snapshot=lambda file: Path(file).write_text(devices.log[-1]),
    )
    with pytest.raises(MemoryError), cuda.memory_history(tmp_path / "history.pickle"):
        raise MemoryError
    assert (tmp_path / "history.pickle").read_text() == "record all" and devices.log == ["record all", "record None"]


@contextmanager
def told(devices: SimulatedDevices, name: str) -> Iterator[None]:
    devices.log.append(name)
    yield
    devices.log.append(f"{name} ends")


def test_dtypes_and_attention_follow_the_compute_capability(cuda: CUDA, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (cuda.dtypes(), cuda.attention()) == (("float32", "bfloat16", "float16"), ("sdpa", "eager"))
    flash = ModuleType("flash_attn")
    flash.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None)
    monkeypatch.setitem(sys.modules, "flash_attn", flash)
    assert cuda.attention() == ("flash_attention_2", "sdpa", "eager")
    cuda.select(1)
    assert (cuda.dtypes(), cuda.attention()) == (("float32", "float16"), ("sdpa", "eager"))


def test_components_are_held_against_their_minima(driver, devices: SimulatedDevices) -> None:
    driver(NVML(b"570.26"))
    rows = CUDA.components()
    assert [(row.name, row.found, row.minimum) for row in rows] == [
        ("driver", "570.26", "570.26"),
        ("CUDA of torch", "12.8", "12.8"),
        ("cuDNN", "9.10.2", "9.10"),
        ("NCCL", "2.27.5", "2.27"),
    ]
    assert not any(row.problem for row in rows)


def test_components_that_are_too_old(driver, devices: SimulatedDevices, monkeypatch: pytest.MonkeyPatch) -> None:
    driver(NVML(b"565.57.01"))
    monkeypatch.setattr(torch.version, "cuda", "12.6")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 90501)
    devices.nccl.version = lambda: (2, 21, 5)
    assert {row.name: row.problem for row in CUDA.components()} == {
        "driver": "570.26 or newer is needed",
        "CUDA of torch": "12.8 or newer is needed",
        "cuDNN": "9.10 or newer is needed",
        "NCCL": "2.27 or newer is needed",
    }


def test_cuda_13_needs_a_driver_of_its_own(driver, devices: SimulatedDevices, monkeypatch: pytest.MonkeyPatch) -> None:
    driver(NVML(b"575.57.08"))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert [row.problem for row in CUDA.components()] == ["580.65.06 or newer is needed", "", "", ""]


def test_what_cannot_be_read_is_a_problem(driver, devices: SimulatedDevices, monkeypatch: pytest.MonkeyPatch) -> None:
    driver(NVML(b"580.65.06", told=999))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: None)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    problems = {row.name: row.problem for row in CUDA.components()}
    assert problems.pop("CUDA of torch") == ""
    assert {name: told.partition(";")[0] for name, told in problems.items()} == dict.fromkeys(
        ("driver", "cuDNN", "NCCL"), "no version can be read"
    )


def test_a_machine_with_a_driver_and_torch_for_the_cpu(driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    driver(NVML(b"580.65.06"))
    assert [(row.name, bool(row.problem)) for row in CUDA.components()] == [("driver", False), ("CUDA of torch", True)]


def test_a_machine_without_a_driver_has_no_components(driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert driver_version() is None and CUDA.components() == ()
    driver(NVML(b"580.65.06", init=9))  # NVML_ERROR_DRIVER_NOT_LOADED
    assert driver_version() is None and CUDA.components() == ()


@pytest.mark.parametrize(("number", "version"), [(91002, "9.10.2"), (90100, "9.1.0"), (8907, "8.9.7"), (None, None)])
def test_how_cudnn_counts(monkeypatch: pytest.MonkeyPatch, number: int | None, version: str | None) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: number)
    assert cudnn_version() == version
