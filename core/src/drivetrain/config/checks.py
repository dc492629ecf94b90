"""Checks of one section in the company of the others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from drivetrain.config.base import PluginConfig, Problem

if TYPE_CHECKING:
    from drivetrain.seam.registry import Registry


def check_options(
    config: PluginConfig, registry: Registry, *, field: str, hook: str, own: Iterable[str], extra: Mapping[str, Any],
    extra_field: str,
) -> Iterator[Problem]:  # fmt: skip
    """Yield a problem if a function that a section selects is not there, or would ignore an option that was set.

    Args:
        field: the section's key that names the function, which ``hook`` offers.
        own: the section's keys that are options of such functions.
        extra: further options, from the key ``extra_field``.
    """
    name = getattr(config, field)
    found = registry.find(hook, name)
    if found.problem:
        yield Problem(key=field, what=found.problem.what, mend=found.problem.mend)
        return
    noun, known = found.spec.noun, sorted(found.spec.options)
    for key in own:
        if config.departs(key) and key not in known:
            yield Problem(key=key, what=f"{noun} {name!r} does not read {key!r}", mend=f"remove {key}")
    for key in extra:
        if key not in known:
            yield Problem(key=f"{extra_field}.{key}", what=f"{noun} {name!r} has no option {key!r}",
                          mend=f"its options: {', '.join(known) or 'none'}")  # fmt: skip


def chosen_options(
    config: PluginConfig, *, field: str, hook: str, own: Iterable[str], extra: Mapping[str, Any]
) -> dict[str, Any]:
    """Keyword arguments for the function that a section selects: its keys that the function takes, and ``extra``.

    The arguments are those of :func:`check_options`.
    """
    from drivetrain.seam.registry import get_registry

    taken = get_registry().find(hook, getattr(config, field)).spec.options
    return {**{key: getattr(config, key) for key in own if key in taken}, **extra}
