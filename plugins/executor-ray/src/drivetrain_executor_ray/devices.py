"""What hardware plugins say about devices, and where a process finds its own."""

from __future__ import annotations

import os

import ray

from drivetrain import Hardware, UserError, get_registry


def kinds() -> dict[str, type[Hardware]]:
    """Each hardware whose devices Ray counts, by its name."""
    registry = get_registry()
    found = {spec.name: registry.load("hardware", spec.name) for spec in registry.specs("hardware")}
    return {name: kind for name, kind in found.items() if getattr(kind, "ray_resource", None)}


def ray_resource(hardware: str) -> str | None:
    """Name under which Ray counts the devices of a hardware; of ``auto``, the one kind that the cluster has.

    Raises:
        UserError: the cluster has no devices of an installed kind, or of several.
    """
    known, there = kinds(), ray.cluster_resources()
    if hardware != "auto":
        kind = known.get(hardware.rpartition(":")[2])
        return kind.ray_resource if kind else None
    resources = {kind.ray_resource for kind in known.values() if kind.ray_resource}
    found = sorted(resource for resource in resources if there.get(resource))
    if len(found) == 1:
        return found[0]
    if found:
        raise UserError(f"the cluster has devices of several kinds: {', '.join(found)}", where="hardware.name",
                        mend=f"pin one of {', '.join(known)}")  # fmt: skip
    kinds_there = ", ".join(sorted(resources)) or "none, for no plugin is installed"
    raise UserError(f"the pool asks for devices, and the cluster has none (kinds that are known: {kinds_there})",
                    where="placement", mend="install the hardware's plugin, or ask for CPUs alone")  # fmt: skip


def has_devices(hardware: str) -> bool:
    """Whether the cluster has devices of a hardware (of any kind that is installed, for ``auto``)."""
    there = ray.cluster_resources()
    return any(there.get(kind.ray_resource or "") for name, kind in kinds().items() if hardware in ("auto", name))


def keep_visible() -> dict[str, str]:
    """Environment variables by which Ray leaves all devices of a node visible to a worker."""
    return {kind.ray_noset_variable: "1" for kind in kinds().values() if kind.ray_noset_variable}


def own_device(resource: str | None) -> int:
    """Index of this process's device among those it sees; -1 without one. Without one, no device stays visible.

    Raises:
        RuntimeError: Ray gave this process no device, or no installed hardware knows it.
    """
    if resource is None:
        for kind in kinds().values():
            if kind.visible_devices_variable:
                os.environ[kind.visible_devices_variable] = ""
        return -1
    assigned = ray.get_runtime_context().get_accelerator_ids().get(resource, [])
    there = [kind for kind in kinds().values() if kind.ray_resource == resource and kind.detect()]
    if not assigned or len(there) != 1:
        raise RuntimeError(f"Ray gave this process {assigned or 'no'} {resource}; hardware that knows such devices: "
                           f"{[kind.__name__ for kind in there]}")  # fmt: skip
    return there[0].local_index_of(str(assigned[0]))
