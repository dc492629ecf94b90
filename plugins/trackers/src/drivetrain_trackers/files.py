"""Files that are whole or not there, and the steps that a resumed run takes again."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path


def replace_with(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` make a file beside the path, which then takes its place."""
    aside = path.with_name(f".{path.name}.part")
    try:
        write(aside)
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def first_to_drop(first_step: int) -> int:
    """The first step whose records go when a run starts at a step; step 0 belongs to a start at step 1."""
    return first_step if first_step > 1 else 0


class KeptId:
    """The id of a service's run, in a file of the run folder."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> str | None:
        """The id; None if there is no file.

        Raises:
            ValueError: the file holds something else.
        """
        if not self._path.exists():
            return None
        return str(json.loads(self._path.read_text(encoding="utf-8"))["id"])

    def write(self, run_id: str) -> None:
        """Keep the id."""
        text = json.dumps({"id": run_id}) + "\n"
        replace_with(self._path, lambda aside: aside.write_text(text, encoding="utf-8"))
