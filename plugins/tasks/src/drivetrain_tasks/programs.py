"""Programs that a policy wrote, each run in processes of its own that do not outlive it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from drivetrain_tasks.side_process import PREPARATION_S

ENDING_S = 15.0
"""Time for a guard to end a program's processes and report."""
_GUARD = Path(__file__).with_name("program_guard.py")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one program may use. Memory and file size are those of each process, output is standard output."""

    time_limit_s: float
    memory_mb: int
    file_mb: int
    output_kb: int
    max_processes: int
    isolate: bool  # namespaces of its own for users, processes and network


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a program."""

    status: str  # ended, time, output, processes or guard: it ended, a limit ended it, or it got at its guard
    exit_code: int | None = None
    output: str = ""
    passed: frozenset[int] = frozenset()  # numbers of the tests that passed


class Refused(RuntimeError):
    """The machine grants no namespaces."""


class GuardLost(RuntimeError):
    """The guard of a program that cannot reach it did not report."""


class NoStart(RuntimeError):
    """The program could not be started; this says nothing about the program."""


def run_program(source: str, limits: Limits, *, tests: Sequence[str] | None = None, stdin: str = "") -> Outcome:
    """Run Python source as a script with text on its standard input, or as a module and then its tests.

    It has a fresh folder as working directory and home, and hardly any environment. All its processes are ended
    before this returns, and if this process ends.

    Raises:
        Refused: ``limits.isolate`` is set and the machine grants no namespaces.
        NoStart: the interpreter does not start.
        GuardLost: ``limits.isolate`` is set and the program's guard did not report.
        OSError: no process or no folder can be made.
    """
    job = {**asdict(limits), "source": source, "tests": tests, "input": stdin, "preparation_s": PREPARATION_S}
    with tempfile.TemporaryDirectory(prefix="drivetrain-code-", ignore_cleanup_errors=True) as folder:
        guard = subprocess.Popen(
            [sys.executable, "-I", "-S", "-X", "utf8", _GUARD], cwd=folder, env=_environment(folder),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        said = b""
        try:
            assert guard.stdin is not None and guard.stdout is not None
            with contextlib.suppress(BrokenPipeError):  # then it says why
                guard.stdin.write(json.dumps(job).encode() + b"\n")
                guard.stdin.flush()
            said = _read(guard.stdout.fileno(), limits.time_limit_s + ENDING_S)
        finally:
            guard.kill()
            guard.wait()
            with contextlib.suppress(OSError):
                guard.stdin.close()  # type: ignore[union-attr]
            guard.stdout.close()  # type: ignore[union-attr]
    return _outcome(said.decode("utf-8", "replace"), isolated=limits.isolate)


def _environment(folder: str) -> dict[str, str]:
    one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    # An interpreter that is built with a shared library may be found by this alone.
    library = {key: os.environ[key] for key in ("LD_LIBRARY_PATH",) if key in os.environ}
    path = "/usr/local/bin:/usr/bin:/bin"
    return {"PATH": path, "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", **one, **library}


def _read(descriptor: int, time_s: float) -> bytes:
    """All that the guard says, until it ends or has had its time; that begins when the program is ready."""
    said, poll, deadline = b"", select.poll(), time.monotonic() + PREPARATION_S + ENDING_S
    poll.register(descriptor, select.POLLIN)
    while poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        chunk = os.read(descriptor, 65536)
        if not chunk:
            break
        if not said:
            deadline = time.monotonic() + time_s
        said += chunk
    return said


def _outcome(said: str, *, isolated: bool) -> Outcome:
    lines = said.splitlines()
    if lines and lines[0].startswith("refused "):
        raise Refused(lines[0].removeprefix("refused "))
    ready = [index for index, line in enumerate(lines) if line.startswith("ready ")]
    if not ready:
        raise NoStart(f"no program can be started: {said.strip()[-1000:] or 'its guard said nothing'}")
    replies = lines[ready[0] + 1 :]
    try:
        reply: dict[str, Any] = json.loads(replies[-1])
    except (IndexError, ValueError) as error:
        if isolated:
            raise GuardLost("the guard of a program ended in the middle; the machine may be out of memory") from error
        # A program without namespaces of its own can end its guard.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(int(lines[ready[0]].split()[1]), signal.SIGKILL)
        return Outcome(status="guard")
    return Outcome(
        status=reply["status"], exit_code=reply["exit"], output=reply["output"], passed=frozenset(reply["passed"])
    )
