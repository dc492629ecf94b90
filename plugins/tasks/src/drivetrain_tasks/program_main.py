"""One program in a process of its own; started by ``program_guard`` with its limits set.

``python -I -X utf8 program_main.py JOB REPORT`` reads the job from the file descriptor JOB and writes to the pipe
REPORT: a line ``<token> ready`` once the interpreter works, and for tests a line ``<token> <number>`` for each that
passes. What ends before a line is written, however it ends, has not passed.
"""

from __future__ import annotations

import builtins
import json
import os
import sys
import types
from typing import Any


def main(job_fd: int, report_fd: int) -> None:
    with os.fdopen(job_fd, "rb") as file:
        job: dict[str, Any] = json.load(file)
    os.set_inheritable(report_fd, False)
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 2)
    os.write(report_fd, f"{job['token']} ready\n".encode())
    if job["tests"] is None:
        os.close(report_fd)
        source = job.pop("source")
        sys.argv = ["solution.py"]
        exec(compile(source, "solution.py", "exec"), _module("__main__"))
    else:
        _run_tests(job["source"], job["tests"], job["token"], report_fd)


def _module(name: str) -> dict[str, Any]:
    sys.modules[name] = module = types.ModuleType(name)
    return module.__dict__


def _run_tests(source: str, tests: list[str], token: str, report_fd: int) -> None:
    # What is used after the solution ran is bound before, so that it makes no difference what the solution replaced.
    write, run, leave, scope = os.write, exec, os._exit, vars(builtins)
    compiled = [(compile(test, "test.py", "exec"), f"{token} {index}\n".encode()) for index, test in enumerate(tests)]
    original = dict(scope)
    namespace = _module("solution")
    try:
        run(compile(source, "solution.py", "exec"), namespace)
    except BaseException:
        leave(1)
    for test, line in compiled:
        scope.clear()
        scope.update(original)
        namespace["__builtins__"] = builtins
        try:
            run(test, namespace)
        except BaseException:
            continue
        write(report_fd, line)
    leave(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
