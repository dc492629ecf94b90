"""To start Ray here, or join a cluster, and to leave it."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

from drivetrain import UserError

CONNECT_S = 10.0


def ray_init(
    *,
    address: str | None = None,
    namespace: str | None = None,
    runtime_env: Mapping[str, Any] | None = None,
    num_cpus: int | None = None,
) -> Callable[[], None]:
    """Join the cluster at ``address`` (``auto``: the one of this machine), or start Ray here if it is None.

    A process that is connected already stays so. Handlers of signals stay as they are.

    Returns:
        a function that ends what was begun here: it stops a Ray that was started, and leaves a cluster that was joined.

    Raises:
        UserError: there is no cluster at the address.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        import ray

        if ray.is_initialized():
            return lambda: None
        if address is not None:
            _check_answers(address)
        options: dict[str, Any] = {"address": address or "local", "namespace": namespace}
        if runtime_env:
            options["runtime_env"] = dict(runtime_env)
        if address is None:
            options |= {"num_cpus": num_cpus, "include_dashboard": False}
        try:
            ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
        except (ConnectionError, ValueError, RuntimeError) as error:
            if address is None:
                raise
            raise _no_cluster(address, error) from error
        return ray.shutdown
    finally:
        if main:
            for number, handler in handlers.items():
                signal.signal(number, handler)


def _check_answers(address: str) -> None:
    """Try the address, for Ray itself would try for minutes."""
    if address.startswith("ray://"):
        raise UserError("drivetrain does not run through a Ray client", where="executor.address",
                        mend="start it on a node of the cluster, with address auto")  # fmt: skip
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
        except OSError as error:
            raise _no_cluster(address, error) from error


def _no_cluster(address: str, error: Exception) -> UserError:
    return UserError(f"no Ray cluster answers at {address!r}: {error}", where="executor.address",
                     mend="start one (ray start --head), or leave address out to start Ray for this run")  # fmt: skip
