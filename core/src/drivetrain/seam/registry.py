"""Select what plugins offer, by name and never by order, and report what was found."""

from __future__ import annotations

import difflib
import functools
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from packaging.utils import canonicalize_name

from drivetrain.config.base import Problem
from drivetrain.errors import PluginError
from drivetrain.seam.discovery import Candidate, scan
from drivetrain.seam.first_party import FIRST_PARTY
from drivetrain.seam.loading import UNUSABLE, Offer, Plugins, brief, import_target
from drivetrain.seam.specs import SPEC_TYPES

__all__ = ["Found", "Registry", "Row", "get_registry", "import_target", "resolve"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of ``drivetrain plugins``; status is ``ok``, ``conflict``, ``skewed``, ``broken`` or ``disabled``.

    ``kind`` is a hook, ``observers`` for a plugin that offers nothing, or empty for a candidate that was not loaded.
    """

    kind: str
    name: str
    distribution: str
    version: str
    summary: str
    status: str
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Found:
    """Result of looking a name up: an offer and its spec, or a problem and its cause."""

    offer: Offer | None = None
    spec: Any = None
    problem: Problem | None = None
    cause: BaseException | None = None


class Registry(Plugins):
    """All that the installed plugins offer, by name."""

    def names(self, hook: str) -> list[str]:
        """Names that can be selected, sorted."""
        return sorted(name for h, name in self.offers if h == hook and self.find(hook, name).offer)

    def specs(self, hook: str) -> list[Any]:
        """Specs that can be selected, sorted by name."""
        return [self.select(hook, name).spec for name in self.names(hook)]

    def find(self, hook: str, name: str) -> Found:
        """Look up ``name`` or ``distribution:name`` without raising."""
        noun = SPEC_TYPES[hook].noun
        distribution, _, short = name.rpartition(":")
        offers = self.offers.get((hook, short), [])
        if distribution:
            offers = [offer for offer in offers if _same(offer.candidate.distribution, distribution)]
        cause: BaseException | None = None
        if not offers:
            what, mend = f"unknown {noun} {name!r}", self._suggestions(hook, short)
            cause = next((f.cause for f in self.failures if f.cause and _names(f.candidate, short)), None)
        elif len(offers) > 1:
            what = f"{noun} {short!r} is offered by {len(offers)} distributions"
            mend = _table([("pick one", f"{offer.candidate.distribution}:{short}") for offer in offers])
        elif offers[0].problem:
            what = f"{noun} {short!r} cannot be used: {offers[0].candidate.label} {offers[0].problem}"
            mend = f"install a version of {offers[0].candidate.distribution} that fits this core"
        else:
            return Found(offer=offers[0], spec=offers[0].spec)
        return Found(problem=Problem(key="name", what=what, mend=mend), cause=cause)

    def select(self, hook: str, name: str) -> Offer:
        """Look up a name.

        Raises:
            PluginError: unknown, in conflict, or not loadable; the cause of a broken distribution is chained.
        """
        found = self.find(hook, name)
        if found.problem is not None:
            raise PluginError("\n  ".join([found.problem.what, *found.problem.mend.splitlines()])) from found.cause
        assert found.offer is not None
        return found.offer

    def load(self, hook: str, name: str) -> Any:
        """Import and return the factory of a name."""
        offer = self.select(hook, name)
        return _import_for(offer, offer.spec.factory)

    def config_model(self, hook: str, name: str) -> Any:
        """Import and return the config model of a name; None if it takes no settings."""
        offer = self.select(hook, name)
        return _import_for(offer, offer.spec.config) if offer.spec.config else None

    def rows(self) -> list[Row]:
        """Everything found, one row an offer, observer or failure."""
        rows = []

        def add(candidate: Candidate, **row: str) -> None:
            rows.append(Row(distribution=candidate.distribution, version=candidate.version, **row))

        for (hook, name), offers in self.offers.items():
            for offer in offers:
                others = ", ".join(other.candidate.distribution for other in offers if other is not offer)
                status = "skewed" if offer.problem else "conflict" if others else "ok"
                add(offer.candidate, kind=hook, name=name, summary=offer.spec.summary, status=status,
                    reason=offer.problem or (f"also offered by {others}" if others else ""))  # fmt: skip
        for candidate, hooks in self.observers:
            add(candidate, kind="observers", name=candidate.entry_point, summary=hooks, status="ok")
        for f in self.failures:
            add(f.candidate, kind="", name=f.candidate.entry_point, summary="", status=f.status, reason=f.reason)
        return sorted(rows, key=lambda row: (row.kind, row.name, row.distribution))

    def unusable(self) -> list[Row]:
        """The rows of what is installed, not switched off, and cannot be selected."""
        return [row for row in self.rows() if row.status not in ("ok", "disabled")]

    def _suggestions(self, hook: str, name: str) -> str:
        installed = [(n, offer) for (h, n), offers in sorted(self.offers.items()) if h == hook for offer in offers]
        there = {canonicalize_name(row.distribution) for row in self.rows()}
        names = {n for n, _ in installed}
        missing = {n: d for n, d in FIRST_PARTY.get(hook, {}).items() if d not in there and n not in names}
        rows = []
        for close in difflib.get_close_matches(name, sorted({*missing, *names}), n=2, cutoff=0.6):
            hint = f" (not installed: pip install {missing[close]})" if close in missing else ""
            rows.append(("did you mean", close + hint))
        rows += [("installed", f"{n} ({offer.candidate.label})") for n, offer in installed if not offer.problem]
        unfit = [(n, offer.candidate, offer.problem) for n, offer in installed if offer.problem]
        unfit += [(f.candidate.entry_point, f.candidate, f.reason) for f in self.failures]
        rows += [("not loadable", f"{n} ({candidate.label} {reason})") for n, candidate, reason in unfit]
        return _table(rows)


def _import_for(offer: Offer, target: str) -> Any:
    try:
        return import_target(target)
    except UNUSABLE as cause:
        raise PluginError(
            f"{offer.spec.noun} {offer.spec.name!r} of {offer.candidate.label} does not import: {brief(cause)}",
            mend=f"mend or reinstall {offer.candidate.distribution}; --traceback shows where",
        ) from cause


def _same(distribution: str, other: str) -> bool:
    return canonicalize_name(distribution) == canonicalize_name(other)


def _names(candidate: Candidate, name: str) -> bool:
    return name in (candidate.entry_point, candidate.distribution) or candidate.entry_point.endswith(f"-{name}")


def _table(rows: Iterable[tuple[str, str]]) -> str:
    return "\n".join(f"{label:<15}{text}" for label, text in rows)


@functools.cache
def get_registry() -> Registry:
    """The registry of this process; it is built once."""
    disabled = [name.strip() for name in os.environ.get("DRIVETRAIN_DISABLE", "").split(",") if name.strip()]
    return Registry(scan(), disabled)


def resolve(hook: str, name: str) -> Any:
    """Import what a name stands for, such as ``resolve("policy_losses", "clip")``; raises ``PluginError``."""
    return get_registry().load(hook, name)
