"""What this distribution offers; torch is not imported here."""

from __future__ import annotations

from collections.abc import Iterable

from drivetrain import HardwareSpec, hookimpl


@hookimpl
def drivetrain_hardware() -> Iterable[HardwareSpec]:
    yield HardwareSpec(
        name="rocm",
        summary="AMD GPUs, over RCCL.",
        factory="drivetrain_hardware_rocm.rocm:ROCm",
        provides=("hardware.rocm",),
    )
