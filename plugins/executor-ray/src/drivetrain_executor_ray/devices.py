"""What hardware plugins say about devices, and where a process finds its own."""

from __future__ import annotations

import os

import ray

from drivetrain import UserError
from drivetrain.seam.registry import get_registry


def kinds() -> dict[str, tuple[str, str | None]]:
    """Ray's resource and the visible-devices variable of each hardware that Ray counts, by its name."""
    registry = get_registry()
    found = {}
    for spec in registry.specs("hardware"):
        factory = registry.load("hardware", spec.name)
        if resource := getattr(factory, "ray_resource", None):
            found[spec.name] = resource, factory.visible_devices_variable
    return found


def ray_resource(hardware: str) -> str | None:
    """Name under which Ray counts the devices of a hardware; of ``auto``, the one kind that the cluster has.

    Raises:
        UserError: the cluster has no devices of an installed kind, or of several.
    """
    known, there = kinds(), ray.cluster_resources()
    if hardware != "auto":
        return known[hardware.rpartition(":")[2]][0] if hardware.rpartition(":")[2] in known else None
    found = {name: resource for name, (resource, _) in known.items() if there.get(resource)}
    if len(set(found.values())) == 1:
        return next(iter(found.values()))
    if found:
        raise UserError(f"the cluster has devices of several kinds: {', '.join(found)}", where="hardware.name",
                        mend=f"pin one, such as hardware.name={next(iter(found))}")  # fmt: skip
    kinds_there = ", ".join(sorted({resource for resource, _ in known.values()})) or "none, for no plugin is installed"
    raise UserError(f"the pool asks for devices, and the cluster has none (kinds that are known: {kinds_there})",
                    where="placement", mend="install the hardware's plugin, or ask for CPUs alone")  # fmt: skip


def has_devices(hardware: str) -> bool:
    """Whether the cluster has devices of a hardware (of any kind that is installed, for ``auto``)."""
    there = ray.cluster_resources()
    return any(there.get(resource) for name, (resource, _) in kinds().items() if hardware in ("auto", name))


def keep_visible() -> dict[str, str]:
    """Environment variables by which Ray leaves all devices of a node visible to a worker."""
    variables = {variable for _, variable in kinds().values() if variable}
    return {f"RAY_EXPERIMENTAL_NOSET_{variable}": "1" for variable in sorted(variables)}


def own_device(resource: str | None) -> int:
    """Index of this process's device among those it sees; -1 without one. Without one, no device stays visible."""
    if resource is None:
        for _, variable in kinds().values():
            if variable:
                os.environ[variable] = ""
        return -1
    assigned = ray.get_runtime_context().get_accelerator_ids().get(resource, [])
    if not assigned:
        raise RuntimeError(f"Ray gave this process no {resource}")
    variable = next(variable for r, variable in kinds().values() if r == resource)
    visible = os.environ.get(variable or "", "")
    return visible.split(",").index(assigned[0]) if visible else int(assigned[0])
