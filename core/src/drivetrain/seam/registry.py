"""Load plugins one by one, keep what they offer, and select by name. Nothing else calls pluggy."""

from __future__ import annotations

import difflib
import functools
import importlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pluggy

from drivetrain.config.base import Problem
from drivetrain.errors import PluginError
from drivetrain.seam import hookspecs
from drivetrain.seam.discovery import Candidate, scan
from drivetrain.seam.first_party import FIRST_PARTY
from drivetrain.seam.specs import SPEC_TYPES, PluginSpec


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A spec and who made it; ``problem`` says why it cannot be selected."""

    spec: PluginSpec
    candidate: Candidate
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A candidate that was not loaded, and why."""

    candidate: Candidate
    status: str
    reason: str
    cause: BaseException | None = None


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of ``drivetrain plugins``; status is ``ok``, ``conflict``, ``skewed``, ``broken`` or ``disabled``."""

    kind: str
    name: str
    distribution: str
    version: str
    summary: str
    status: str
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Found:
    """Result of looking a name up: an offer, or a problem and its cause."""

    offer: Offer | None = None
    problem: Problem | None = None
    cause: BaseException | None = None

    @property
    def spec(self) -> Any:
        """The spec of the offer."""
        assert self.offer is not None
        return self.offer.spec


class Registry:
    """All that the installed plugins offer."""

    def __init__(self, candidates: Sequence[Candidate], disabled: Iterable[str] = ()) -> None:
        self._manager = pluggy.PluginManager("drivetrain")
        self._manager.add_hookspecs(hookspecs)
        self._offers: dict[tuple[str, str], list[Offer]] = {}
        self.failures: list[Failure] = []
        off = set(disabled)
        for candidate in candidates:
            if off & {candidate.entry_point, candidate.distribution}:
                self.failures.append(Failure(candidate=candidate, status="disabled", reason="DRIVETRAIN_DISABLE"))
            elif candidate.unmet:
                self._fail(candidate, "; ".join(candidate.unmet), status="skewed")
            else:
                self._load(candidate)

    # -- loading ----------------------------------------------------------------------------------------------------

    def _fail(self, candidate: Candidate, reason: str, cause: BaseException | None = None, status: str = "broken") -> None:
        self.failures.append(Failure(candidate=candidate, status=status, reason=reason, cause=cause))

    def _load(self, candidate: Candidate) -> None:
        try:
            plugin = import_target(candidate.value)
        except (Exception, SystemExit) as cause:
            return self._fail(candidate, f"importing {candidate.value} raised {_brief(cause)}", cause)
        try:
            self._manager.register(plugin, name=f"{candidate.distribution}:{candidate.entry_point}")
            self._manager.check_pending()
        except (pluggy.PluginValidationError, ValueError) as cause:
            self._manager.unregister(plugin)
            return self._fail(candidate, str(cause).strip().splitlines()[-1].strip(), cause)
        offers: list[Offer] = []
        for hook in SPEC_TYPES:
            for implementation in self._implementations(hook, plugin):
                try:
                    offers += [_offer(hook, spec, candidate) for spec in implementation.function()]
                except Exception as cause:
                    self._manager.unregister(plugin)
                    return self._fail(candidate, f"its hook drivetrain_{hook} raised {_brief(cause)}", cause)
        keys = [(offer.spec.hook, offer.spec.name) for offer in offers]
        twice = [name for hook, name in keys if keys.count((hook, name)) > 1]
        if twice:
            self._manager.unregister(plugin)
            return self._fail(candidate, f"it offers {twice[0]!r} twice")
        for key, offer in zip(keys, offers):
            self._offers.setdefault(key, []).append(offer)

    def _implementations(self, hook: str, plugin: Any = None) -> Iterator[Any]:
        for implementation in getattr(self._manager.hook, f"drivetrain_{hook}").get_hookimpls():
            if plugin is None or implementation.plugin is plugin:
                yield implementation

    # -- looking up -------------------------------------------------------------------------------------------------

    def names(self, hook: str) -> list[str]:
        """Names that can be selected, sorted."""
        return sorted(name for (h, name), offers in self._offers.items()
                      if h == hook and len(offers) == 1 and not offers[0].problem)  # fmt: skip

    def specs(self, hook: str) -> list[Any]:
        """Specs that can be selected, sorted by name."""
        return [self.select(hook, name).spec for name in self.names(hook)]

    def find(self, hook: str, name: str) -> Found:
        """Look up ``name`` or ``distribution:name`` without raising."""
        noun = SPEC_TYPES[hook].noun
        distribution, _, short = name.rpartition(":")
        offers = [o for o in self._offers.get((hook, short), ())
                  if not distribution or o.candidate.distribution == distribution]  # fmt: skip
        if not offers:
            what, mend = f"unknown {noun} {name!r}", self._suggestions(hook, short)
            causes = [f.cause for f in self.failures if f.cause and _names(f.candidate, short)]
            return Found(problem=Problem(key="name", what=what, mend=mend), cause=causes[0] if causes else None)
        if len(offers) > 1:
            choices = "\n".join(f"pick one        {o.candidate.distribution}:{short}" for o in offers)
            what = f"{noun} {short!r} is offered by {len(offers)} distributions"
            return Found(problem=Problem(key="name", what=what, mend=choices))
        if offers[0].problem:
            what = f"{noun} {short!r} cannot be used: {offers[0].candidate.label} {offers[0].problem}"
            return Found(problem=Problem(key="name", what=what, mend="install a version that fits this core"))
        return Found(offer=offers[0])

    def select(self, hook: str, name: str) -> Offer:
        """Look up a name.

        Raises:
            PluginError: unknown, in conflict, or not loadable; the cause of a broken distribution is chained.
        """
        found = self.find(hook, name)
        if found.offer is None:
            assert found.problem is not None
            lines = [found.problem.what, *(f"  {line}" for line in found.problem.mend.splitlines())]
            raise PluginError("\n".join(lines)) from found.cause
        return found.offer

    def load(self, hook: str, name: str) -> Any:
        """Import and return the factory of a name."""
        offer = self.select(hook, name)
        return self._import_for(offer, offer.spec.factory)

    def config_model(self, hook: str, name: str) -> Any:
        """Import and return the config model of a name; None if it takes no settings."""
        offer = self.select(hook, name)
        return self._import_for(offer, offer.spec.config) if offer.spec.config else None

    def _import_for(self, offer: Offer, target: str) -> Any:
        try:
            return import_target(target)
        except Exception as cause:
            raise PluginError(
                f"{offer.spec.noun} {offer.spec.name!r} of {offer.candidate.label} does not import: {_brief(cause)}",
                mend=f"mend or reinstall {offer.candidate.distribution}; --traceback shows where",
            ) from cause

    def _suggestions(self, hook: str, name: str) -> str:
        first_party = FIRST_PARTY.get(hook, {})
        installed = self.names(hook)
        lines = []
        for close in difflib.get_close_matches(name, sorted({*installed, *first_party}), n=2, cutoff=0.6):
            missing = close not in installed and close in first_party
            hint = f" (not installed: pip install {first_party[close]})" if missing else ""
            lines.append(("did you mean", f"{close}{hint}"))
        for other in installed:
            lines.append(("installed", f"{other} ({self._offers[hook, other][0].candidate.label})"))
        for failure in self.failures:
            disabled = failure.status == "disabled"
            reason = "is switched off by DRIVETRAIN_DISABLE" if disabled else failure.reason
            lines.append(("not loadable", f"{failure.candidate.entry_point} ({failure.candidate.label} {reason})"))
        return "\n".join(f"{label:<15}{text}" for label, text in lines)

    # -- reporting --------------------------------------------------------------------------------------------------

    def rows(self) -> list[Row]:
        """Everything found, one row an offer or failure."""
        rows = []
        for (hook, name), offers in self._offers.items():
            for offer in offers:
                others = [o.candidate.distribution for o in offers if o is not offer]
                status = "skewed" if offer.problem else "conflict" if others else "ok"
                reason = offer.problem or (f"also offered by {', '.join(others)}" if others else "")
                rows.append(Row(kind=hook, name=name, distribution=offer.candidate.distribution,
                                version=offer.candidate.version, summary=offer.spec.summary, status=status,
                                reason=reason))  # fmt: skip
        for failure in self.failures:
            c = failure.candidate
            rows.append(Row(kind="", name=c.entry_point, distribution=c.distribution, version=c.version, summary="",
                            status=failure.status, reason=failure.reason))  # fmt: skip
        return sorted(rows, key=lambda row: (row.kind, row.name, row.distribution))

    def notify(self, observer: str, event: Any) -> list[str]:
        """Call an observer hook of each plugin, each guarded; returns what went wrong, one line a plugin."""
        complaints = []
        for implementation in self._implementations(observer):
            try:
                implementation.function(*[event for _ in implementation.argnames])
            except Exception as cause:
                complaints.append(f"observer {implementation.plugin_name} raised {_brief(cause)}")
        return complaints


def _offer(hook: str, spec: Any, candidate: Candidate) -> Offer:
    expected = SPEC_TYPES[hook]
    if not isinstance(spec, expected):
        raise TypeError(f"expected {expected.__name__}, got {type(spec).__name__}")
    problem = ""
    if spec.contract_version not in expected.versions:
        ours = ", ".join(map(str, sorted(expected.versions)))
        problem = f"follows version {spec.contract_version} of the {expected.noun} contract; this core drives {ours}"
    return Offer(spec=spec, candidate=candidate, problem=problem)


def _names(candidate: Candidate, name: str) -> bool:
    return name in (candidate.entry_point, candidate.distribution) or candidate.entry_point.endswith(f"-{name}")


def _brief(cause: BaseException) -> str:
    first = str(cause).strip().splitlines()[:1]
    return f"{type(cause).__name__}: {first[0]}" if first else type(cause).__name__


def import_target(target: str) -> Any:
    """Import what ``"module:attribute"`` names."""
    module, _, attribute = target.partition(":")
    found: Any = importlib.import_module(module)
    for part in filter(None, attribute.split(".")):
        found = getattr(found, part)
    return found


@functools.cache
def get_registry() -> Registry:
    """The registry of this process; it is built once."""
    disabled = [name.strip() for name in os.environ.get("DRIVETRAIN_DISABLE", "").split(",") if name.strip()]
    return Registry(scan(), disabled)


def resolve(hook: str, name: str) -> Any:
    """Import what a name stands for, such as ``resolve("policy_losses", "clip")``.

    Raises:
        PluginError: the name cannot be selected, or what it names does not import.
    """
    return get_registry().load(hook, name)
