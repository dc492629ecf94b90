"""A process that can be killed, for verifiers that evaluate what a policy wrote.

A thread cannot be interrupted while it computes ``9**9**9``, and it holds the interpreter lock meanwhile.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import queue
import subprocess
import sys
import threading
import weakref
from typing import Any

PREPARATION_S = 30.0
"""Time for what does not depend on the policy, such as parsing a reference; running out of it is an error."""


class Stuck(Exception):
    """The process gave no reply in time, or ended; the next call gets a new one."""


class Ended(Stuck):
    """The process ended in the middle of a call."""


class SideProcess:
    """Calls one function in a process of its own; arguments and results are JSON values."""

    def __init__(self, function: str, warm_up: dict[str, Any]) -> None:
        """Start the process, without waiting for it.

        Args:
            function: ``"module:function"``; it takes a dict and returns a dict.
            warm_up: a first argument, so that imports do not count against the time of a call.
        """
        self._function, self._warm_up = function, warm_up
        self._start()

    def _start(self) -> None:
        path = os.pathsep.join(filter(None, sys.path))
        command = [sys.executable, "-m", __name__, self._function, json.dumps(self._warm_up)]
        # A session of its own: an interrupt from the keyboard is for the run, which may go on to a checkpoint.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8", start_new_session=True,
            env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        self._end = weakref.finalize(self, _end, self._process)
        self._ready = False
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=_pump, args=(self._process.stdout, self._lines), daemon=True).start()

    def call(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """The function's result.

        Raises:
            Stuck: the function takes longer than ``timeout_s``, or its process ended, and a second one as well.
            RuntimeError: the function raised, or the process did not start.
        """
        with contextlib.suppress(Ended):
            return self._call(request, timeout_s)
        return self._call(request, timeout_s)

    def _call(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        if self._process.poll() is not None:
            self._end()
            self._start()
        if not self._ready and self._lines.get() == "":
            raise RuntimeError(f"the process of {self._function} did not start; see its error output")
        self._ready = True
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            self._end()
            raise Stuck(f"no reply within {timeout_s:g} s") from None
        except OSError:
            line = ""
        if line == "":
            self._end()
            raise Ended(f"the process ended with code {self._process.returncode}")
        reply: dict[str, Any] = json.loads(line)
        if "raised" in reply:
            raise RuntimeError(reply["raised"])
        return reply


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    with contextlib.suppress(OSError):
        process.stdin.close()  # type: ignore[union-attr]


def _pump(stream: Any, lines: queue.Queue[str]) -> None:
    with stream:
        for line in stream:
            lines.put(line)
    lines.put("")


def _serve(name: str, warm_up: dict[str, Any]) -> None:
    # Replies have standard output to themselves; what the function prints goes to the error output.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    module, _, attribute = name.partition(":")
    function = getattr(importlib.import_module(module), attribute)
    function(warm_up)
    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        try:
            reply = function(json.loads(line))
        except Exception as error:
            reply = {"raised": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    _serve(sys.argv[1], json.loads(sys.argv[2]))
