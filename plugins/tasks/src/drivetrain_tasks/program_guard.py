"""Stands between the trainer and one program: sets limits, watches, ends every process, and reports.

``python -I -S program_guard.py`` reads a job, one line of JSON, from standard input, which then stays open: when it
closes, the trainer is gone, and the program ends. It writes ``ready <process id>`` once the program's interpreter works
and then one line of JSON::

    {"status": "ended" | "time" | "output" | "processes", "exit": int | null, "output": text, "passed": [test numbers]}

or, in place of both, ``refused <reason>`` where the machine has no namespaces for it. Anything else is a failure of the
machine. Nothing is imported here but the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

SET_PDEATHSIG, SET_DUMPABLE, SET_CHILD_SUBREAPER, SET_NO_NEW_PRIVS = 1, 4, 36, 38  # linux/prctl.h
NEW_IPC, NEW_USER, NEW_PID, NEW_NET = 0x08000000, 0x10000000, 0x20000000, 0x40000000  # linux/sched.h
POLL_S = 0.01
THREADS = 64  # RLIMIT_NPROC counts threads, too
# From this kernel on RLIMIT_NPROC counts the user's processes in the namespace, before all of the machine.
OWN_COUNT = tuple(int(part) for part in re.findall(r"\d+", os.uname().release)[:2]) >= (5, 14)
_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {option}")


def _file(content: bytes) -> int:
    """A descriptor of an anonymous file."""
    descriptor = os.memfd_create("job")
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _descendants() -> Iterator[int]:
    """Process ids of all descendants of this process, zombies too; a parent comes before its children are looked up."""
    parents = [os.getpid()]
    for pid in parents:
        try:
            for thread in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{thread}/children") as file:
                    children = [int(child) for child in file.read().split()]
                parents += children
                yield from children
        except (FileNotFoundError, ProcessLookupError):
            if pid == os.getpid():
                raise


def _kill_all(program: int) -> None:
    """Returns when this process has no descendants any more; orphans become its children, as it is their reaper."""
    # In namespaces of its own the program is their first process, and all others end with it.
    for kill in (os.kill, os.killpg):
        _send(kill, program)
    while True:
        for pid in _descendants():
            _send(os.kill, pid)
        try:
            while os.waitpid(-1, os.WNOHANG)[0] != 0:
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)


def _send(kill: Callable[[int, int], None], target: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        kill(target, signal.SIGKILL)


def _become(job: dict[str, Any], descriptors: tuple[int, int, int, int]) -> None:
    """In the forked process: become the program."""
    stdin, stdout, program_fd, report_fd = descriptors
    os.setsid()
    _prctl(SET_PDEATHSIG, signal.SIGKILL)
    os.dup2(stdin, 0)
    os.dup2(stdout, 1)
    os.set_inheritable(program_fd, True)
    os.set_inheritable(report_fd, True)
    megabyte, seconds = 2**20, int(job["time_limit_s"]) + 2
    for limit, value in (
        (resource.RLIMIT_AS, job["memory_mb"] * megabyte),
        (resource.RLIMIT_FSIZE, job["file_mb"] * megabyte),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, job["max_processes"] + THREADS if job["isolate"] and OWN_COUNT else -1),
    ):
        hard = resource.getrlimit(limit)[1]
        value = min((bound for bound in (value, hard) if bound != resource.RLIM_INFINITY), default=value)
        resource.setrlimit(limit, (value, value))
    main = os.path.join(os.path.dirname(os.path.abspath(__file__)), "program_main.py")
    os.execv(sys.executable, [sys.executable, "-I", "-X", "utf8", main, str(program_fd), str(report_fd)])


def _start(job: dict[str, Any], token: str) -> tuple[int, int, int]:
    """Process id of the program, and the reading ends of its report and of its standard output."""
    content = {"token": token, "source": job["source"], "tests": job["tests"]}
    program_fd, stdin = _file(json.dumps(content).encode()), _file(job["input"].encode())
    report, report_end = os.pipe()
    output, output_end = os.pipe()
    stdout = os.open(os.devnull, os.O_WRONLY) if job["tests"] is not None else output_end
    pid = os.fork()
    if pid == 0:
        try:
            _become(job, (stdin, stdout, program_fd, report_end))
        finally:
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
            os._exit(1)
    for descriptor in {program_fd, stdin, stdout, report_end, output_end}:
        os.close(descriptor)
    return pid, report, output


def _watch(job: dict[str, Any], token: str, pid: int, report: int, output: int) -> dict[str, Any] | None:
    """The reply on the program; None if the trainer is gone."""
    limits = {output: job["output_kb"] * 1024, report: 2**20}
    read = {output: b"", report: b""}
    poll = select.poll()
    for descriptor in (0, output, report):
        poll.register(descriptor, select.POLLIN)
    deadline, status, exit_code, ready = time.monotonic() + job["preparation_s"], "", None, False

    def take(wait_s: float) -> bool:
        """Read what there is, at most so much at once; False if there was nothing."""
        events = poll.poll(wait_s * 1000)
        for descriptor, _ in events:
            chunk = os.read(descriptor, 65536)
            if not chunk:
                poll.unregister(descriptor)
            if descriptor == 0:
                raise EOFError
            read[descriptor] += chunk
        return bool(events)

    try:
        while not status:
            take(POLL_S)
            if not ready and read[report].startswith(f"{token} ready\n".encode()):
                ready, deadline = True, time.monotonic() + job["time_limit_s"]
                print("ready", pid, flush=True)
            now = time.monotonic()
            if any(len(read[descriptor]) > most for descriptor, most in limits.items()):
                status = "output"
            elif end := os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                status, exit_code = "ended", end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
            elif now > deadline:
                status = "time"
            elif next(islice(_descendants(), job["max_processes"], None), None) is not None:
                status = "processes"
        _kill_all(pid)
        # No process is left that could write more.
        while take(0) and all(len(read[descriptor]) <= most for descriptor, most in limits.items()):
            pass
    except EOFError:
        _kill_all(pid)
        return None
    if len(read[output]) > limits[output]:
        status = "output"
    lines = [line.split() for line in read[report].decode("utf-8", "replace").splitlines()]
    passed = [int(line[1]) for line in lines if len(line) == 2 and line[0] == token and line[1].isdigit()]
    text = read[output][: limits[output]].decode("utf-8", "replace")
    if not ready:
        print(f"the program's interpreter did not start (exit code {exit_code}, status {status})", flush=True)
        sys.exit(1)
    return {"status": status, "exit": exit_code, "output": text, "passed": passed}


def main() -> None:
    line = b""
    while not line.endswith(b"\n"):
        chunk = os.read(0, 65536)
        if not chunk:
            return  # the trainer is gone
        line += chunk
    job: dict[str, Any] = json.loads(line)
    with contextlib.suppress(OSError):  # where it may: a program with many processes must not keep this one waiting
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    if job["isolate"] and _libc.unshare(NEW_USER | NEW_PID | NEW_NET | NEW_IPC) != 0:
        print(f"refused {os.strerror(ctypes.get_errno())}", flush=True)
        return
    _prctl(SET_CHILD_SUBREAPER, 1)
    _prctl(SET_NO_NEW_PRIVS, 1)
    _prctl(SET_DUMPABLE, 0)  # other processes of this user can't look into this one's memory
    next(_descendants(), None)  # raises where /proc has no list of children
    token = os.urandom(16).hex()
    pid, report, output = _start(job, token)
    reply = _watch(job, token, pid, report, output)
    if reply is None:
        import shutil

        shutil.rmtree(os.getcwd(), ignore_errors=True)
    else:
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
