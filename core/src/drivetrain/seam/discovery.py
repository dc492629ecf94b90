"""Find the distributions that announce plugins, without importing any of them."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

GROUP = "drivetrain"
CORE = "drivetrain-core"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One entry point of the group ``drivetrain``, not yet imported.

    Attributes:
        entry_point: its name.
        value: the module that it points to.
        distribution, version: who announces it.
        unmet: the distribution's requirements that this environment does not meet, in words.
    """

    entry_point: str
    value: str
    distribution: str
    version: str
    unmet: tuple[str, ...]

    @property
    def label(self) -> str:
        """``distribution version``, as messages name it."""
        return f"{self.distribution} {self.version}"


def scan(path: Iterable[str] | None = None) -> list[Candidate]:
    """List the candidates, sorted by distribution and entry point.

    Args:
        path: folders to look into; by default those of ``sys.path``.
    """
    found = importlib.metadata.distributions() if path is None else importlib.metadata.distributions(path=list(path))
    distributions: dict[str, importlib.metadata.Distribution] = {}
    for distribution in found:
        name = distribution.metadata["Name"]
        if name:  # the first one found on the path is the one that would be imported
            distributions.setdefault(canonicalize_name(name), distribution)
    versions = {name: distribution.version for name, distribution in distributions.items()}
    candidates = [
        Candidate(entry_point=entry.name, value=entry.value, distribution=distribution.metadata["Name"],
                  version=distribution.version, unmet=unmet_requirements(distribution.requires or (), versions))
        for distribution in distributions.values()
        for entry in distribution.entry_points
        if entry.group == GROUP
    ]  # fmt: skip
    return sorted(candidates, key=lambda c: (canonicalize_name(c.distribution), c.entry_point))


def unmet_requirements(requires: Iterable[str], versions: Mapping[str, str]) -> tuple[str, ...]:
    """Say which requirements the installed versions do not meet, extras left out."""
    unmet = []
    for text in requires:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            unmet.append(f"has the malformed requirement {text!r}")
            continue
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        name = canonicalize_name(requirement.name)
        wanted = f"{requirement.name}{requirement.specifier}"
        if name not in versions:
            unmet.append(f"needs {wanted}; it is not installed")
        elif not _contains(requirement, versions[name]):
            this = "this is" if name == CORE else "installed is"
            unmet.append(f"needs {wanted}; {this} {versions[name]}")
    return tuple(unmet)


def _contains(requirement: Requirement, version: str) -> bool:
    try:
        return requirement.specifier.contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False
