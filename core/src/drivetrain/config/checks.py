"""Checks of one section in the company of the others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from drivetrain.config.base import PluginConfig, Problem

if TYPE_CHECKING:
    from drivetrain.seam.registry import Registry


def check_options(
    config: PluginConfig,
    registry: Registry,
    *,
    field: str,
    hook: str,
    own: Iterable[str],
    extra: Mapping[str, Any],
    extra_field: str,
) -> Iterator[Problem]:
    """Check the options of a function that an algorithm selects by name.

    Args:
        config: the algorithm's section.
        field: its key that names the function.
        hook: the hook that offers the function.
        own: the section's keys that are options of such functions.
        extra: further options, from the key ``extra_field``.

    Yields:
        problems: the name cannot be selected, or the function would ignore an option that was set.
    """
    name = getattr(config, field)
    found = registry.find(hook, name)
    if found.problem:
        yield Problem(key=field, what=found.problem.what, mend=found.problem.mend)
        return
    known = set(found.spec.options)
    for key in own:
        if key in config.model_fields_set and key not in known:
            yield Problem(key=key, what=f"{found.spec.noun} {name!r} does not read {key!r}", mend=f"remove {key}")
    for key in extra:
        if key not in known:
            choices = ", ".join(sorted(known)) or "none"
            yield Problem(key=f"{extra_field}.{key}", what=f"{found.spec.noun} {name!r} has no option {key!r}",
                          mend=f"its options: {choices}")  # fmt: skip
