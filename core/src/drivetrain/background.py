"""Work that goes on beside the rest of a process."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar
from weakref import WeakSet

T = TypeVar("T")

_started: WeakSet[threading.Thread] = WeakSet()


def start_daemon(work: Callable[[], None], name: str) -> threading.Thread:
    """Work in a thread that a process which ends by :func:`leave` does not wait for."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    _started.add(thread)
    thread.start()
    return thread


def leave(code: int) -> None:
    """End the process, also while threads of :func:`start_daemon` work.

    As the interpreter ends it stops a daemon thread that comes back to it from native code, such as an operation of
    torch, in a way that aborts the process. So where there is one, the process ends without that, once functions of
    ``atexit`` have run.
    """
    if any(thread.is_alive() for thread in _started):
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def in_background(work: Callable[[], T], name: str) -> Future[T]:
    """Work in a thread; what it returns or raises, ``result()`` of the future does.

    The thread is one of :func:`start_daemon`.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    start_daemon(run, name)
    return future
