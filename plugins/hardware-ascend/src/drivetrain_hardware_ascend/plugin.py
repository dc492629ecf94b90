"""What this distribution offers; torch is not imported here."""

from __future__ import annotations

from collections.abc import Iterable

from drivetrain import HardwareSpec, hookimpl


@hookimpl
def drivetrain_hardware() -> Iterable[HardwareSpec]:
    yield HardwareSpec(
        name="ascend",
        summary="Huawei Ascend NPUs, over HCCL.",
        factory="drivetrain_hardware_ascend.ascend:Ascend",
        provides=("hardware.ascend",),
    )
