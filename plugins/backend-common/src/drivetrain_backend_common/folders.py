"""Folders that appear whole or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def complete(folder: Path) -> Iterator[Path]:
    """An empty folder to write to, which becomes ``folder``, in place of an earlier one, if no error is raised."""
    aside = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    yield aside
    if folder.exists():
        old = folder.with_name(f".{folder.name}.old")
        folder.rename(old)
        aside.rename(folder)
        shutil.rmtree(old)
    else:
        aside.rename(folder)
