"""What this distribution offers; torch is not imported here."""

from __future__ import annotations

from collections.abc import Iterable

from drivetrain import HardwareSpec, hookimpl


@hookimpl
def drivetrain_hardware() -> Iterable[HardwareSpec]:
    yield HardwareSpec(
        name="cuda",
        summary="NVIDIA GPUs, over NCCL.",
        factory="drivetrain_hardware_cuda.cuda:CUDA",
        provides=("hardware.cuda",),
    )
