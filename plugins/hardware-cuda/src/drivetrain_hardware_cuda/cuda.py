"""The hardware ``cuda``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from drivetrain import DeviceMemory, Hardware, UserError

if TYPE_CHECKING:
    from drivetrain import PluginConfig


class CUDA(Hardware):
    """NVIDIA GPUs, over NCCL."""

    device_type = "cuda"
    communication_backend = "nccl"
    visible_devices_variable = "CUDA_VISIBLE_DEVICES"
    ray_resource = "GPU"

    def __init__(self, config: PluginConfig) -> None:
        """Raises UserError when this process has no such device."""
        super().__init__(config)
        if not self.detect():
            why = "this build of torch is not for CUDA" if torch.version.cuda is None else "torch finds no NVIDIA GPU"
            raise UserError(f"no CUDA device: {why}", where="hardware.name",
                            mend="use a machine with a GPU and torch for CUDA, or set hardware.name=cpu")  # fmt: skip

    @classmethod
    def detect(cls) -> int:
        # a ROCm build of torch answers to torch.cuda as well
        return torch.cuda.device_count() if torch.version.cuda is not None and torch.cuda.is_available() else 0

    def device(self, local_index: int = 0) -> torch.device:
        return torch.device("cuda", local_index)

    def device_name(self, local_index: int = 0) -> str:
        return torch.cuda.get_device_name(local_index)

    def memory(self, local_index: int = 0) -> DeviceMemory:
        free, total = torch.cuda.mem_get_info(local_index)
        return DeviceMemory(
            total=total,
            free=free,
            allocated=torch.cuda.memory_allocated(local_index),
            peak=torch.cuda.max_memory_allocated(local_index),
        )

    def dtypes(self) -> tuple[str, ...]:
        return ("float32", "bfloat16", "float16") if torch.cuda.is_bf16_supported() else ("float32", "float16")

    def attention(self) -> tuple[str, ...]:
        return ("sdpa", "eager")

    def rng_state(self) -> dict[str, torch.Tensor]:
        return {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state()}

    def set_rng_state(self, state: dict[str, torch.Tensor]) -> None:
        torch.set_rng_state(state["cpu"])
        torch.cuda.set_rng_state(state["cuda"])

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    @contextmanager
    def stream(self) -> Iterator[torch.cuda.Stream]:
        """Work inside goes to a stream of its own, which starts after and ends before the work around it."""
        around, own = torch.cuda.current_stream(), torch.cuda.Stream()
        own.wait_stream(around)
        with torch.cuda.stream(own):
            yield own
        around.wait_stream(own)

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()
