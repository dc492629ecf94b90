"""Whatever is offered as an advantage estimator or as a term of an objective keeps what each of them has to.

One class of tests a name; its options are the function's defaults. A plugin that is installed is in here by itself.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from drivetrain.seam.registry import get_registry
from drivetrain.testing import AdvantageConformance, LossConformance

#: tests whose outcome a class has to declare, because it follows from the formula; the plugins' own classes do
DECLARED = ("test_equal_rewards",)
CONFORMANCE: dict[str, type[Any]] = {"advantage_estimators": AdvantageConformance, "policy_losses": LossConformance}


def suites() -> dict[str, type[Any]]:
    """A subclass of the conformance class for every name, by the name of the subclass."""
    found = {}
    for hook, base in CONFORMANCE.items():
        for name in get_registry().names(hook):
            title = f"Test_{hook}_{re.sub(r'[^0-9a-zA-Z]', '_', name)}"
            found[title] = type(title, (base,), {"name": name, "__module__": __name__, **dict.fromkeys(DECLARED)})
    return found


globals().update(suites())


@pytest.mark.parametrize("hook", CONFORMANCE)
def test_every_name_loads_and_is_covered(hook: str) -> None:
    rows = [row for row in get_registry().rows() if row.kind == hook]
    covered = {suite.name for suite in suites().values() if issubclass(suite, CONFORMANCE[hook])}
    assert {row.name for row in rows} == covered and {"gae", "clip"} & covered
    for name in covered:
        assert callable(get_registry().load(hook, name))
