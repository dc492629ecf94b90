"""What the tests across plugins share: a command line in this process, or in a process of its own."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def drivetrain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs ``drivetrain ARGUMENTS`` in this process and a temporary folder; asserts the exit code.

    What it prints is caught, and a process need not import torch for each command.
    """
    from drivetrain.cli import main

    for name in [name for name in os.environ if name.startswith("DRIVETRAIN_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object, code: int = 0) -> subprocess.CompletedProcess[str]:
        words, out, errors = [*map(str, arguments)], io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            done = subprocess.CompletedProcess(words, main.run(words))
        done.stdout, done.stderr = out.getvalue(), errors.getvalue()
        assert done.returncode == code, done.stdout + done.stderr
        return done

    return run


@pytest.fixture
def drivetrain_process(tmp_path: Path) -> Run:
    """Runs ``drivetrain ARGUMENTS`` in a process of its own and a temporary folder; asserts the exit code."""

    def run(*arguments: object, code: int = 0) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", "from drivetrain.cli.main import main; main()", *map(str, arguments)]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("DRIVETRAIN_")}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == code, done.stdout + done.stderr
        return done

    return run
