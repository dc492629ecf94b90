"""Load plugins one by one, each guarded, and call their hooks. Nothing else calls pluggy."""

from __future__ import annotations

import difflib
import pkgutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pluggy
from packaging.utils import canonicalize_name

from drivetrain.seam import hookspecs
from drivetrain.seam.discovery import Candidate
from drivetrain.seam.specs import SPEC_TYPES, PluginSpec

PREFIX = "drivetrain_"
#: what foreign code may raise without ending the program
UNUSABLE = (Exception, SystemExit)


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A spec and who made it; ``problem`` says why it cannot be selected."""

    spec: PluginSpec
    candidate: Candidate
    problem: str = ""


@dataclass(frozen=True)
class Failure:
    """A candidate that was not loaded; ``reason`` goes on after the name of its distribution."""

    candidate: Candidate
    status: str
    reason: str
    cause: BaseException | None = None


class _Misfit(Exception):
    """What is wrong with a plugin, in words that go on after the name of its distribution."""


class Plugins:
    """What candidates turned out to be."""

    def __init__(self, candidates: Sequence[Candidate], disabled: Iterable[str] = ()) -> None:
        self._manager = pluggy.PluginManager("drivetrain")
        self._manager.add_hookspecs(hookspecs)
        self.offers: dict[tuple[str, str], list[Offer]] = {}  # by hook and name; more than one is a conflict
        self.observers: list[tuple[Candidate, str]] = []  # plugins that offer nothing, with the hooks they implement
        self.failures: list[Failure] = []
        off = {canonicalize_name(name) for name in disabled}
        for candidate in candidates:
            if off & {canonicalize_name(name) for name in (candidate.entry_point, candidate.distribution)}:
                self.failures.append(Failure(candidate, "disabled", "is switched off by DRIVETRAIN_DISABLE"))
            elif candidate.unmet:
                self.failures.append(Failure(candidate, "skewed", "; ".join(candidate.unmet)))
            else:
                self._load(candidate)

    def notify(self, observer: str, event: Any) -> list[str]:
        """Call an observer hook of each plugin, each guarded; returns what went wrong, one line a plugin."""
        complaints = []
        for implementation in getattr(self._manager.hook, PREFIX + observer).get_hookimpls():
            try:
                implementation.function(*[event for _ in implementation.argnames])
            except UNUSABLE as cause:
                complaints.append(f"observer {implementation.plugin_name} raised {brief(cause)}")
        return complaints

    def _load(self, candidate: Candidate) -> None:
        plugin = None
        try:
            plugin = import_target(candidate.value)
            first = self._manager.get_name(plugin)
            if first is not None:
                self.failures.append(Failure(candidate, "conflict", f"announces {candidate.value}, as {first} does"))
                return
            self._manager.register(plugin, name=f"{candidate.distribution}:{candidate.entry_point}")
            self._manager.check_pending()
            offers = self._collect(plugin, candidate)
        except UNUSABLE as cause:
            if self._manager.is_registered(plugin):
                self._manager.unregister(plugin)
            reason = f"does not import: {brief(cause)}" if plugin is None else _misfit(cause)
            self.failures.append(Failure(candidate, "broken", reason, cause))
            return
        for offer in offers:
            self.offers.setdefault((offer.spec.hook, offer.spec.name), []).append(offer)
        if not offers:
            hooks = sorted(caller.name for caller in self._manager.get_hookcallers(plugin) or ())
            self.observers.append((candidate, ", ".join(hooks)))

    def _collect(self, plugin: Any, candidate: Candidate) -> list[Offer]:
        """Call the collecting hooks that a plugin implements."""
        offers: dict[tuple[str, str], Offer] = {}
        callers = self._manager.get_hookcallers(plugin) or []
        if not callers:
            raise _Misfit(f"implements no hook in {candidate.value}; is @drivetrain.hookimpl missing?")
        for name, implementation in ((c.name, i) for c in callers for i in c.get_hookimpls() if i.plugin is plugin):
            if implementation.wrapper or implementation.hookwrapper:
                raise _Misfit(f"wraps {name}, which is not possible: implementations are called one by one")
            hook, call = name.removeprefix(PREFIX), implementation.function
            try:
                specs: list[Any] = list(call()) if hook in SPEC_TYPES else []  # type: ignore[call-overload]
            except UNUSABLE as cause:
                raise _Misfit(f"cannot be asked for {hook}: {brief(cause)}") from cause
            for spec in specs:
                offer = _offer(hook, spec, candidate)
                if offers.setdefault((hook, spec.name), offer) is not offer:
                    raise _Misfit(f"offers {spec.noun} {spec.name!r} twice")
        return list(offers.values())


def _offer(hook: str, spec: Any, candidate: Candidate) -> Offer:
    expected = SPEC_TYPES[hook]
    if not isinstance(spec, expected):
        raise _Misfit(f"offers {type(spec).__name__} as one of {hook}, which take {expected.__name__}")
    problem = ""
    if spec.contract_version not in expected.versions:
        ours = ", ".join(map(str, sorted(expected.versions)))
        problem = f"follows version {spec.contract_version} of the {expected.noun} contract; this core drives {ours}"
    return Offer(spec=spec, candidate=candidate, problem=problem)


def _misfit(cause: BaseException) -> str:
    text = str(cause)
    if isinstance(cause, _Misfit):
        return text
    if not isinstance(cause, pluggy.PluginValidationError):
        return f"cannot be registered: {brief(cause)}"
    if text.startswith("unknown hook"):
        name = text.split("'")[1]
        close = difflib.get_close_matches(name, [hook for hook in vars(hookspecs) if hook.startswith(PREFIX)], n=1)
        return f"implements unknown hook {name!r}" + "".join(f"; did you mean {hook!r}?" for hook in close)
    return "implements a hook wrongly: " + "; ".join(line.strip() for line in text.splitlines()[1:])


def brief(cause: BaseException) -> str:
    """The kind of an error and the first line of its message."""
    first = str(cause).strip().splitlines()[:1]
    return ": ".join([type(cause).__name__, *first])


def import_target(target: str) -> Any:
    """Import what ``"module:attribute"`` names."""
    return pkgutil.resolve_name(target if ":" in target else f"{target}:")
