"""The hardware ``cuda``."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from drivetrain import Component, TorchAccelerator

NVML_SUCCESS = 0


class CUDA(TorchAccelerator):
    """NVIDIA GPUs, over NCCL."""

    device_type = "cuda"
    communication_backend = "nccl"
    visible_devices_variable = "CUDA_VISIBLE_DEVICES"
    ray_resource = "GPU"
    ray_noset_variable = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"

    @classmethod
    def detect(cls) -> int:
        # a ROCm build of torch answers to torch.cuda as well
        return torch.cuda.device_count() if torch.version.cuda is not None and torch.cuda.is_available() else 0

    @classmethod
    def absence(cls) -> str:
        return "this build of torch is not for CUDA" if torch.version.cuda is None else "torch finds no NVIDIA GPU"

    @classmethod
    def components(cls) -> Sequence[Component]:
        """Driver, CUDA, cuDNN and NCCL, where there is an NVIDIA driver.

        The driver has to be the one of CUDA 12.8 or 13.0 (Table 3 of NVIDIA's CUDA Toolkit release notes). Versions of
        cuDNN and NCCL are those that torch 2.9 for CUDA 12.8 was released with, the oldest torch that is supported.
        """
        driver = driver_version()
        if driver is None and not cls.detect():
            return ()
        cuda = torch.version.cuda
        rows = [
            Component(name="driver", found=driver, minimum="580.65.06" if (cuda or "").startswith("13.") else "570.26",
                      mend="install a newer NVIDIA driver"),
            Component(name="CUDA of torch", found=cuda, minimum="12.8", mend="install torch for CUDA 12.8 or newer"),
        ]  # fmt: skip
        if cuda is not None:
            mend = "reinstall torch with the libraries that its wheel names"
            nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else ()
            rows += [
                Component(name="cuDNN", found=cudnn_version(), minimum="9.10", mend=mend),
                Component(name="NCCL", found=".".join(map(str, nccl)) or None, minimum="2.27", mend=mend),
            ]
        return rows

    def device_uuid(self, local_index: int | None = None) -> str:
        return f"GPU-{torch.cuda.get_device_properties(self.device(local_index)).uuid}"  # as nvidia-smi writes it

    def dtypes(self) -> tuple[str, ...]:
        # bfloat16 in hardware begins with compute capability 8.0; torch emulates it below
        native = torch.cuda.get_device_capability(self.device()) >= (8, 0)
        return ("float32", "bfloat16", "float16") if native else ("float32", "float16")

    def attention(self) -> tuple[str, ...]:
        # flash-attn's kernels begin with compute capability 8.0 and take 16-bit dtypes alone
        flash = importlib.util.find_spec("flash_attn") and torch.cuda.get_device_capability(self.device()) >= (8, 0)
        return ("flash_attention_2", "sdpa", "eager") if flash else ("sdpa", "eager")

    def range(self, name: str) -> AbstractContextManager[Any]:
        return torch.cuda.nvtx.range(name)

    def profiler(self) -> AbstractContextManager[Any]:
        return torch.cuda.profiler.profile()


def driver_version() -> str | None:
    """Version of the NVIDIA driver, asked of NVML; None if none answers."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    if nvml.nvmlInit_v2() != NVML_SUCCESS:
        return None
    try:
        version = ctypes.create_string_buffer(80)  # NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE
        told = nvml.nvmlSystemGetDriverVersion(version, ctypes.c_uint(len(version)))
        return version.value.decode() if told == NVML_SUCCESS else None
    finally:
        nvml.nvmlShutdown()


def cudnn_version() -> str | None:
    """Version of the cuDNN that torch uses; None without one."""
    number = torch.backends.cudnn.version()
    if number is None:
        return None
    of_major = 10_000 if number >= 90_000 else 1_000  # CUDNN_VERSION of cudnn_version.h: since 9.0, 10000 a major
    return f"{number // of_major}.{number % of_major // 100}.{number % 100}"
