"""A folder of distributions as all that is installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from drivetrain.seam import registry
from drivetrain.seam.discovery import scan


@contextmanager
def only_installed(folder: Path) -> Iterator[None]:
    """The registry of this process knows the folder alone; after a change, ``get_registry.cache_clear()``."""
    folder.mkdir(exist_ok=True)
    before = registry.get_registry()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setattr(registry, "scan", lambda: scan([str(folder)]))
        registry.get_registry.cache_clear()
        yield
        patch.setattr(registry, "Registry", lambda *_: before)
        registry.get_registry.cache_clear()
        registry.get_registry()
