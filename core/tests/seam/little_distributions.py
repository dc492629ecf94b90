"""Little distributions in a folder: installed ones for every purpose of importlib.metadata."""

from __future__ import annotations

import sys
import textwrap
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import drivetrain
from drivetrain.seam.discovery import scan
from drivetrain.seam.registry import Registry

CORE_VERSION = "0.2.0"

GOOD = """
    from drivetrain import AlgorithmSpec, hookimpl

    @hookimpl
    def drivetrain_algorithms():
        yield AlgorithmSpec(name="{name}", summary="Does {name}.", factory="{package}.work:Work")
"""


class Site:
    """A folder such as ``site-packages``, seen alone: what else the machine has installed stays out of it.

    It holds core as version 0.2.0, so that skew can be told apart from the version at hand.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._dist_info("drivetrain-core", CORE_VERSION, (), {"core": "drivetrain.builtin.plugin"})

    def add(
        self,
        distribution: str,
        plugin: str = GOOD,
        *,
        version: str = "1.0",
        requires: Iterable[str] = ("drivetrain-core>=0.1",),
        entry_points: Mapping[str, str] | None = None,
        files: Mapping[str, str] | None = None,
        name: str = "",
        package: str = "",
    ) -> str:
        """Install a distribution whose package has ``plugin`` as its module ``plugin``; returns the package's name.

        ``{name}`` and ``{package}`` in the texts stand for what is offered and for the package.
        """
        package = package or distribution.replace("-", "_")
        name = name or distribution.rpartition("-")[2]
        texts = {"__init__.py": "", "plugin.py": plugin, "work.py": "class Work: ...", **(files or {})}
        for file, text in texts.items():
            path = self.folder / package / file
            path.parent.mkdir(exist_ok=True)
            path.write_text(_fill(text, name, package))
        self._dist_info(distribution, version, requires, entry_points or {name: f"{package}.plugin"})
        return package

    def _dist_info(
        self, distribution: str, version: str, requires: Iterable[str], entry_points: Mapping[str, str]
    ) -> None:
        for file, text in dist_info(distribution, version, requires, entry_points).items():
            path = self.folder / file
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)

    def registry(self, *disabled: str) -> Registry:
        return Registry(scan([str(self.folder)]), disabled)

    def forget(self) -> None:
        """Make the next import read the files again."""
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", "")).startswith(str(self.folder)):
                del sys.modules[name]


def dist_info(
    distribution: str, version: str, requires: Iterable[str], entry_points: Mapping[str, str]
) -> dict[str, str]:
    """The files of a ``*.dist-info`` folder."""
    folder = f"{distribution.replace('-', '_')}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {requirement}\n" for requirement in requires)
    announced = "".join(f"{name} = {target}\n" for name, target in entry_points.items())
    return {
        f"{folder}/METADATA": metadata,
        f"{folder}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{folder}/entry_points.txt": f"[drivetrain]\n{announced}",
        f"{folder}/RECORD": "",
    }


def build_wheel(folder: Path, distribution: str, plugin: str = GOOD, version: str = "1.0") -> Path:
    """Write a wheel by hand."""
    package, name = distribution.replace("-", "_"), distribution.rpartition("-")[2]
    info = dist_info(distribution, version, ["drivetrain-core"], {name: f"{package}.plugin"})
    files = {f"{package}/__init__.py": "", f"{package}/plugin.py": _fill(plugin, name, package), **info}
    record = next(file for file in files if file.endswith("RECORD"))
    files[record] = "".join(f"{file},,\n" for file in files)
    path = folder / f"{package}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
    return path


def _fill(text: str, name: str, package: str) -> str:
    return textwrap.dedent(text).replace("{name}", name).replace("{package}", package)


CORE_SOURCE = Path(drivetrain.__file__).parent
