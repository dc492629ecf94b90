"""The hardware ``ascend``: torch with Huawei's extension ``torch_npu``, which registers ``torch.npu``."""

from __future__ import annotations

import importlib.util
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from drivetrain import Component, TorchAccelerator, UserError

DEVICE_NODES = Path("/dev")  # the driver makes /dev/davinci0, /dev/davinci1, ...


class Ascend(TorchAccelerator):
    """Huawei Ascend NPUs, over HCCL."""

    device_type = "npu"
    communication_backend = "hccl"
    visible_devices_variable = "ASCEND_RT_VISIBLE_DEVICES"
    ray_resource = "NPU"
    ray_noset_variable = "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES"

    @classmethod
    def detect(cls) -> int:
        extension = _extension()
        return extension.npu.device_count() if extension is not None and extension.npu.is_available() else 0

    @classmethod
    def absence(cls) -> str:
        return "torch_npu is not installed" if _extension() is None else "torch_npu finds no NPU"

    @classmethod
    def components(cls) -> Sequence[Component]:
        """torch_npu, CANN and driver, where torch_npu is installed or there is an NPU.

        torch_npu has to be the one of torch's version, and CANN 8.5 is the first that torch_npu 2.9 works with
        (version table of torch_npu's README). The driver's version is told without a minimum: in a container its file
        need not be there.
        """
        extension = _extension()
        if extension is None and not any(DEVICE_NODES.glob("davinci[0-9]*")):
            return ()
        own = ".".join(torch.__version__.split(".")[:2])
        rows = [Component(name="torch_npu", found=extension and str(extension.__version__), minimum=own,
                          mend=f"pip install torch-npu=={own}.*, and CANN for it")]  # fmt: skip
        if extension is not None:
            cann, driver = (extension.utils.get_cann_version(module=name) or None for name in ("CANN", "DRIVER"))
            rows += [
                Component(name="CANN", found=cann, minimum="8.5", mend="install CANN 8.5 or newer, source set_env.sh"),
                Component(name="driver", found=driver),
            ]
        return rows

    def device_uuid(self, local_index: int | None = None) -> str:
        """Host and number on it: the releases of torch_npu that are supported do not all tell a UUID."""
        visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES", "")
        index = self.device(local_index).index
        return f"NPU-{platform.node()}-{visible.split(',')[index].strip() if visible else index}"

    def dtypes(self) -> tuple[str, ...]:
        return ("float32", "bfloat16", "float16") if self.torch_module.is_bf16_supported() else ("float32", "float16")

    def attention(self) -> tuple[str, ...]:
        # transformers answers to flash_attention_2 with torch_npu's fused attention, in 16-bit dtypes alone
        return ("flash_attention_2", "sdpa", "eager")


def _extension() -> Any:
    """The module ``torch_npu``; None if it is not installed."""
    if importlib.util.find_spec("torch_npu") is None:
        return None
    try:
        return importlib.import_module("torch_npu")
    except (ImportError, OSError, RuntimeError) as cause:
        raise UserError(
            f"torch_npu is installed and does not load: {cause}",
            where="hardware",
            mend="source set_env.sh of CANN, and match the versions of torch, torch_npu and CANN",
        ) from cause
