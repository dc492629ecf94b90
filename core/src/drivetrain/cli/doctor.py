"""``drivetrain doctor``: what this machine has, and what is wrong with it."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from typing import Any

from drivetrain import __version__
from drivetrain.seam.registry import get_registry

ENGINES = ("torch", "transformers", "tensordict", "ray", "megatron-core", "transformer-engine", "vllm", "sglang")


def doctor(*, as_json: bool) -> int:
    """Print the findings; returns 1 if something is installed but cannot be used."""
    registry = get_registry()
    broken = registry.unusable()
    report: dict[str, Any] = {
        "drivetrain": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "engines": {name: _version(name) for name in ENGINES},
        "hardware": _hardware(registry),
        "not_loadable": [vars(row) for row in broken],
    }
    components = [component for row in report["hardware"] for component in row["components"]]
    wrong = [row for row in [*report["hardware"], *components] if row["problem"]] + broken
    if as_json:
        print(json.dumps(report, indent=2))
        return 1 if wrong else 0
    print(f"drivetrain {__version__}   Python {report['python']}   {report['platform']}")
    for name, version in report["engines"].items():
        print(f"  {name:<20} {version or 'not installed'}")
    for row in report["hardware"]:
        print(f"  {row['name']:<20} {row['problem'] or row['devices']}")
        for component in row["components"]:
            told = component["found"] or "no version"
            if component["problem"]:
                told += f"   {component['problem']}: {component['mend']}"
            elif component["minimum"]:
                told += f"   ({component['minimum']} or newer)"
            print(f"    {component['name']:<18} {told}")
    for row in broken:
        print(f"  {row.status:<20} {row.distribution} {row.version}: {row.reason}")
    print("something is not usable" if wrong else "all that is installed can be used")
    return 1 if wrong else 0


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _hardware(registry: Any) -> list[dict[str, Any]]:
    rows = []
    from drivetrain.builtin.auto_hardware import AUTO

    for name in registry.names("hardware"):
        if name == AUTO:
            continue
        row: dict[str, Any] = {"name": name, "devices": "not detected", "problem": "", "components": []}
        try:
            kind = registry.load("hardware", name)
            row["components"] = [{**vars(part), "problem": part.problem} for part in kind.components()]
            count = kind.detect()
            if count:
                from drivetrain.config import PluginConfig

                model = registry.config_model("hardware", name) or PluginConfig
                hardware = kind(model(name=name))
                memory = hardware.memory()
                row["devices"] = f"{count} x {hardware.device_name()}, {memory.total / 2**30:.0f} GiB"
        except Exception as error:
            row["problem"] = f"{type(error).__name__}: {error}"
        rows.append(row)
    return rows
