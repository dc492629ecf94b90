"""The registry of the test process: built from what is really installed, and put back after a test that swaps it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from drivetrain.seam import registry as module
from drivetrain.seam.registry import Registry, get_registry

INSTALLED = get_registry()  # before any test puts a folder of little distributions on the path


def _use(made: Registry) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "Registry", lambda *_: made)
        get_registry.cache_clear()
        get_registry()


@pytest.fixture
def make_current() -> Iterator[Callable[[Registry], None]]:
    """Makes a registry that of this process, for every module that asks, until the test ends."""
    yield _use
    _use(INSTALLED)
