"""What a node is asked before anything starts on it. Sent as it is, for the node may lack this package: the standard
library is all that it imports, and built-in types are all that it returns."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

GROUP = "drivetrain"  # of the entry points by which plugins and core are found
PACKAGES = ("torch", "transformers", "ray")
MOST_FILES = 1000


def probe(paths: Sequence[str], folder: str, token: str, search: Sequence[str]) -> dict[str, Any]:
    """Look at paths and versions.

    Args:
        paths: files and folders, absolute.
        folder: one that has to be shared and written to; empty for none.
        token: name of a file in it.
        search: where modules are looked for besides ``sys.path``.

    Returns:
        report: ``paths``, by path, as :func:`_look` says; ``versions`` by distribution; ``folder``, what is wrong with
        the shared folder.
    """
    return {
        "paths": {path: _look(path) for path in paths},
        "versions": _versions([*sys.path, *(place for place in search if place not in sys.path)]),
        "folder": _shared(folder, token) if folder else "",
    }


def _look(path: str) -> dict[str, Any]:
    """``fault``, empty if all can be read; ``files``, the size of each; ``config``, a checksum of config.json."""
    found: dict[str, Any] = {"fault": "", "files": {}, "config": ""}
    name = ""
    try:
        os.stat(path)
        for name in _files(path):
            with open(os.path.join(path, name) if name else path, "rb") as file:
                file.read(1)
                found["files"][name] = os.fstat(file.fileno()).st_size
        if "config.json" in found["files"]:
            name = "config.json"
            with open(os.path.join(path, name), "rb") as file:
                found["config"] = hashlib.sha256(file.read()).hexdigest()
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not name:
            return {**found, "fault": "is not there"}
        found["fault"] = f"cannot be read: {error.strerror or error}" + (f" ({name})" if name else "")
    return found


def _files(path: str) -> Iterator[str]:
    """The file itself, or the first files below a folder, by their relative names."""
    if not os.path.isdir(path):
        yield ""
        return
    count = 0
    for folder, inner, files in os.walk(path, onerror=_raise):
        inner.sort()
        for file in sorted(files):
            full = os.path.join(folder, file)
            count += 1
            if count > MOST_FILES:
                return
            if os.path.isfile(full) or os.path.islink(full):  # a link to nothing is an error, a socket is not
                yield os.path.relpath(full, path)


def _raise(error: OSError) -> None:
    raise error


def _versions(search: list[str]) -> dict[str, str]:
    """Python, the packages named above, and all distributions that offer plugins; of two of a name the first counts."""
    found: dict[str, str] = {}
    offering = {"python": f"{sys.version_info.major}.{sys.version_info.minor}"}
    for distribution in importlib.metadata.distributions(path=search):
        try:
            name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"]).lower()
            if name in found:
                continue
            found[name] = distribution.version
            if name in PACKAGES or any(entry.group == GROUP for entry in distribution.entry_points):
                offering[name] = distribution.version
        except Exception:  # spoilt metadata of another distribution
            continue
    return offering


def _shared(folder: str, token: str) -> str:
    if not os.path.isdir(folder):
        return "is not there"
    if not os.path.exists(os.path.join(folder, token)):
        return "is another folder than the driver's"
    return "" if os.access(folder, os.W_OK) else "cannot be written to"
