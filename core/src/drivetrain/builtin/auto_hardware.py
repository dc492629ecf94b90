"""``hardware.name=auto``: the one accelerator that is there, or else the CPU."""

from __future__ import annotations

from drivetrain.config import PluginConfig
from drivetrain.contracts.hardware import Hardware
from drivetrain.errors import UserError
from drivetrain.seam.registry import get_registry

AUTO = "auto"


def detected_name() -> str:
    """Name of the hardware to use.

    Raises:
        UserError: accelerators of two kinds are there, or a kind is installed that cannot be asked.
    """
    registry = get_registry()
    for name in sorted(name for hook, name in registry.offers if hook == "hardware"):
        registry.select("hardware", name)  # one in conflict may be the one that is there
    specs = [spec for spec in registry.specs("hardware") if spec.name != AUTO]
    present = [spec for spec in specs if registry.load("hardware", spec.name).detect() > 0]
    accelerators = [spec.name for spec in present if not spec.fallback]
    if len(accelerators) > 1:
        raise UserError(f"several kinds of accelerator are present: {', '.join(accelerators)}",
                        where="hardware.name", mend=f"pin one, such as hardware.name={accelerators[0]}")  # fmt: skip
    return str(accelerators[0] if accelerators else next(spec.name for spec in present))


def detect(config: PluginConfig) -> Hardware:
    """Build the hardware that is there."""
    registry, name = get_registry(), detected_name()
    model = registry.config_model("hardware", name) or PluginConfig
    hardware: Hardware = registry.load("hardware", name)(model(name=name))
    return hardware
