"""What the tests across plugins share: a command line in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def drivetrain(tmp_path: Path) -> Run:
    """Runs ``drivetrain ARGUMENTS`` in a temporary folder; asserts the exit code."""

    def run(*arguments: object, code: int = 0) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", "from drivetrain.cli.main import main; main()", *map(str, arguments)]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("DRIVETRAIN_")}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == code, done.stdout + done.stderr
        return done

    return run
