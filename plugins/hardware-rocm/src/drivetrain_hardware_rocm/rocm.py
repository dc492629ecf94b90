"""The hardware ``rocm``: torch's build for HIP, which answers under the names of CUDA."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from drivetrain import Component, TorchAccelerator

COMPUTE_NODE = Path("/dev/kfd")  # there when the kernel has a driver for AMD's compute devices
DRIVER_VERSION = Path("/sys/module/amdgpu/version")  # there when the driver is AMD's package, not the kernel's own


class ROCm(TorchAccelerator):
    """AMD GPUs, over RCCL, which torch calls nccl."""

    device_type = "cuda"
    communication_backend = "nccl"
    visible_devices_variable = "HIP_VISIBLE_DEVICES"
    ray_resource = "GPU"
    ray_noset_variable = "RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES"

    @classmethod
    def detect(cls) -> int:
        return torch.cuda.device_count() if torch.version.hip is not None and torch.cuda.is_available() else 0

    @classmethod
    def absence(cls) -> str:
        return "this build of torch is not for ROCm" if torch.version.hip is None else "torch finds no AMD GPU"

    @classmethod
    def components(cls) -> Sequence[Component]:
        """Driver, ROCm and RCCL, where the kernel has a compute device of AMD's.

        The driver's version is told without a minimum: AMD's matrix of drivers and ROCm releases has a range, and the
        kernel's own driver has no version. RCCL comes with torch.
        """
        if not COMPUTE_NODE.exists() and not cls.detect():
            return ()
        rocm = torch.version.hip
        rows = [
            Component(name="driver", found=DRIVER_VERSION.read_text().strip() if DRIVER_VERSION.exists() else None),
            Component(name="ROCm of torch", found=rocm, minimum="6.2", mend="install torch for ROCm 6.2 or newer"),
        ]
        if rocm is not None and torch.distributed.is_nccl_available():
            rows.append(Component(name="RCCL", found=".".join(map(str, torch.cuda.nccl.version()))))
        return rows

    def device_uuid(self, local_index: int | None = None) -> str:
        return f"GPU-{torch.cuda.get_device_properties(self.device(local_index)).uuid}"

    def dtypes(self) -> tuple[str, ...]:
        return ("float32", "bfloat16", "float16") if torch.cuda.is_bf16_supported() else ("float32", "float16")

    def attention(self) -> tuple[str, ...]:
        flash = importlib.util.find_spec("flash_attn")
        return ("flash_attention_2", "sdpa", "eager") if flash else ("sdpa", "eager")

    def range(self, name: str) -> AbstractContextManager[Any]:
        return torch.cuda.nvtx.range(name)  # roctx in torch for HIP

    def profiler(self) -> AbstractContextManager[Any]:
        return torch.cuda.profiler.profile()  # hipProfilerStart and hipProfilerStop
