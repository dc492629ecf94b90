"""Files that are whole or not there."""

from __future__ import annotations

import os
from pathlib import Path


def write_aside(path: Path, text: str) -> None:
    """Write beside the path, then take its place."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        aside.write_bytes(text.encode("utf-8", "replace"))
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
