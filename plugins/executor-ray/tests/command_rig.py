"""The command line in a process of its own, and what is left of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

MAIN = [sys.executable, "-c", "from drivetrain.cli.main import main; main()"]


def environment(**more: str) -> dict[str, str]:
    return {
        **{k: v for k, v in os.environ.items() if not k.startswith(("DRIVETRAIN_", "RAY_"))},
        "OMP_NUM_THREADS": "1",
        **more,
    }


def start(*arguments: object, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen([*MAIN, *map(str, arguments)], env=environment(**env), text=True, start_new_session=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip


def metrics_of(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def title(pid: int) -> str:
    """What a process calls itself; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def finishes(process: subprocess.Popen[str]) -> str:
    out, _ = process.communicate(timeout=200)
    return out


def wait_for(process: subprocess.Popen[str], found: Callable[[], bool]) -> None:
    while not found():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)
