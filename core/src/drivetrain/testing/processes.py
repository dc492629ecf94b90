"""For tests that start processes: what these have installed, and what is left of them."""

from __future__ import annotations

import os
from pathlib import Path


def install(module: Path, folder: Path) -> str:
    """Write what makes a module a distribution that is a plugin; returns the PYTHONPATH that makes it installed.

    Args:
        module: a file of Python that has hooks; its name is that of the distribution.
        folder: a new one, which what is written goes below.
    """
    name = module.stem
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: drivetrain-core\n"
    (info / "METADATA").write_text(metadata)
    (info / "entry_points.txt").write_text(f"[drivetrain]\n{name} = {name}\n")
    return os.pathsep.join([str(folder), str(module.parent)])


def marked_processes(marker: str) -> list[int]:
    """Processes of this machine (Linux) whose environment holds a marker; those that have ended do not count."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and marker.encode() in (folder / "environ").read_bytes():
                if (folder / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                    found.append(int(folder.name))
        except OSError:
            continue
    return found
