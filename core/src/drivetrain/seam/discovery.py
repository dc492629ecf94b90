"""Find the distributions that announce plugins, without importing any of them."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from packaging.markers import UndefinedComparison, UndefinedEnvironmentName
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

GROUP = "drivetrain"
CORE = "drivetrain-core"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One entry point of the group ``drivetrain``, not yet imported."""

    entry_point: str
    value: str  # the module that it points to
    distribution: str
    version: str
    unmet: tuple[str, ...]  # requirements of the distribution that this environment does not meet, in words

    @property
    def label(self) -> str:
        """``distribution version``, as messages name it."""
        return f"{self.distribution} {self.version}"


def scan(path: Iterable[str] | None = None) -> list[Candidate]:
    """List the candidates in folders, by default those of ``sys.path``, sorted by distribution and entry point."""
    found = importlib.metadata.distributions() if path is None else importlib.metadata.distributions(path=list(path))
    distributions: dict[str, importlib.metadata.Distribution] = {}
    for distribution in found:  # the first one found on the path is the one that would be imported
        distributions.setdefault(canonicalize_name(_field(distribution, "Name")), distribution)
    versions = {name: _field(distribution, "Version") for name, distribution in distributions.items()}
    candidates = [c for distribution in distributions.values() for c in _candidates(distribution, versions)]
    return sorted(candidates, key=lambda c: (canonicalize_name(c.distribution), c.entry_point, c.value))


def _candidates(distribution: importlib.metadata.Distribution, versions: Mapping[str, str]) -> Iterator[Candidate]:
    name, version = _field(distribution, "Name"), _field(distribution, "Version")
    announced: list[tuple[str, str]] = []
    try:
        announced = [(entry.name, entry.value) for entry in distribution.entry_points if entry.group == GROUP]
        unmet = _unmet(distribution.requires or (), versions) if announced else ()
    except Exception:  # spoilt metadata of one distribution do not hide the others
        spoilt = f"[{GROUP}]" in (distribution.read_text("entry_points.txt") or "")
        announced = announced or [(name, "")] * spoilt
        unmet = ("has metadata that cannot be read",)
    for entry_point, value in announced:
        yield Candidate(entry_point=entry_point, value=value, distribution=name, version=version, unmet=unmet)


def _field(distribution: importlib.metadata.Distribution, name: str) -> str:
    """A line of the metadata; ``unknown`` if it is missing, as after an installation that was cut short."""
    try:
        return distribution.metadata[name] or "unknown"
    except Exception:
        return "unknown"


def _unmet(requires: Iterable[str], versions: Mapping[str, str]) -> tuple[str, ...]:
    """Say which requirements the installed versions do not meet, extras left out."""
    unmet = []
    for text in requires:
        try:
            requirement = Requirement(text)
            applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        except (InvalidRequirement, UndefinedComparison, UndefinedEnvironmentName):
            unmet.append(f"has the malformed requirement {text!r}")
            continue
        there = versions.get(canonicalize_name(requirement.name))
        if applies and not _meets(there, requirement):
            this = "this is" if canonicalize_name(requirement.name) == CORE else "installed is"
            have = "it is not installed" if there is None else f"{this} {there}"
            unmet.append(f"needs {requirement.name}{requirement.specifier}; {have}")
    return tuple(unmet)


def _meets(version: str | None, requirement: Requirement) -> bool:
    try:
        return version is not None and requirement.specifier.contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False
