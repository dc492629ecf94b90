"""What holds for every call of a worker group."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Deadlines, logs and data of worker groups; the fields are those of the executor's config."""

    start_timeout_s: float = 300.0
    call_timeout_s: float = 1800.0
    log_lines: int = 20
    log_dir: Path | None = None  # a log file a rank; omitted, a folder of the session below Ray's temporary folder
    reference_bytes: int = 16 << 20
