"""A process of a pool, and the workers that live in it; and what the driver and a process say to each other."""

from __future__ import annotations

import faulthandler
import math
import os
import pickle
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray

from drivetrain import DrivetrainError, RankLayout, Worker, dispatch_call
from drivetrain_executor_ray.devices import own_device
from drivetrain_executor_ray.transport import MOVED, Moved, mapped, pack, unpack


@dataclass(frozen=True, kw_only=True)
class Whereabouts:
    """Where a process is."""

    node_id: str
    address: str
    device: int  # index among those of its node; -1 without devices
    pid: int
    port: int  # free when asked


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a process stands among those of its group."""

    rank: int
    world_size: int
    local_rank: int
    master_address: str
    master_port: int
    timeout_s: float
    log_file: Path


@dataclass(frozen=True, kw_only=True)
class Member:
    """A worker to start: its class and what that is made with."""

    cls: type[Worker]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Raised:
    """What a worker raised."""

    rank: int
    call: str
    role: str
    kind: str  # of the exception
    text: str
    error: bytes | None  # the exception, if it can be sent
    exit_code: int

    @classmethod
    def of(cls, error: BaseException, *, rank: int, call: str, role: str) -> Raised:
        """Describe an exception."""
        try:
            sent = pickle.dumps(error)
            pickle.loads(sent)
        except Exception:
            sent = None
        code = error.exit_code if isinstance(error, DrivetrainError) else 1
        return cls(rank=rank, call=call, role=role, kind=type(error).__name__, text=str(error), error=sent,
                   exit_code=code)  # fmt: skip


@dataclass(kw_only=True)
class Reply:
    """What a rank answers."""

    output: Any = None
    raised: Raised | None = None
    layout: RankLayout | None = None
    moved: Moved = field(default_factory=Moved)
    dispatched: Any = None  # of a call that was split by its ranks


@dataclass(frozen=True)
class Result:
    """Stands for the result of another call among arguments: the replies ``start`` to ``stop`` of what comes along."""

    start: int
    stop: int
    dispatched: Any  # of a call that the driver split; None: it is in the replies


@dataclass(frozen=True, kw_only=True)
class Work:
    """A call for one rank.

    With ``layouts`` the arguments are those of the whole call, and the rank takes its part itself, since the driver has
    not seen the results among them.
    """

    member: str
    role: str  # as messages name it
    method: str
    mesh: str
    args: Any
    kwargs: Any
    layouts: Sequence[RankLayout] | None
    reference_bytes: float
    deadline_s: float


class CallFailed(Exception):
    """A call on whose result another one depends has failed."""

    def __init__(self, raised: Raised) -> None:
        super().__init__(raised.text)
        self.raised = raised


def joined(replies: Sequence[Reply], dispatched: Any) -> Any:
    """The result of a call, from the replies of the ranks that were asked. Raises CallFailed."""
    for reply in replies:
        if reply.raised is not None:
            raise CallFailed(reply.raised)
    if dispatched is None:  # every rank was asked, and said which ones take part
        dispatched = replies[0].dispatched
        replies = [replies[rank] for rank in dispatched.ranks]
    with MOVED.timed():
        outputs = [unpack(reply.output) for reply in replies]
    return dispatched.collect(outputs)


class Process:
    """The actor of Ray."""

    def __init__(self, resource: str | None) -> None:
        self._workers: dict[str, Worker] = {}
        self._device = own_device(resource)
        self._rank = 0
        self._watched = _Watch()

    def where(self) -> Whereabouts:
        """Say where this is."""
        with socket.socket() as free:
            free.bind(("", 0))
            return Whereabouts(node_id=ray.get_runtime_context().get_node_id(), device=self._device, pid=os.getpid(),
                               address=ray.util.get_node_ip_address(), port=free.getsockname()[1])  # fmt: skip

    def start(self, role: str, members: bytes, path: list[str], place: Place) -> Reply:
        """Make the workers; those of a process share its process group.

        Args:
            members: of type ``dict[str, Member]``, pickled.
            path: where the driver finds modules, among them perhaps those of its workers.
        """
        _log_to(place.log_file)
        sys.path += [folder for folder in path if folder not in sys.path]
        self._rank = place.rank
        os.environ.update(MASTER_ADDR=place.master_address, MASTER_PORT=str(place.master_port), RANK=str(place.rank),
                          WORLD_SIZE=str(place.world_size), LOCAL_RANK=str(place.local_rank))  # fmt: skip
        with self._answering(role, "start") as reply, self._watched("start", place.timeout_s):
            found: dict[str, Member] = ray.cloudpickle.loads(members)
            for name, member in found.items():
                self._workers[name] = member.cls(
                    *member.args, **member.kwargs, rank=place.rank, world_size=place.world_size,
                    local_rank=place.local_rank, timeout_s=place.timeout_s,
                )  # fmt: skip
        return reply

    def layout(self, member: str, mesh: str) -> RankLayout:
        """Where a worker stands in a mesh."""
        return self._workers[member].layout(mesh)

    def call(self, work: Work, *along: Any) -> Reply:
        """Call a method of a worker; columns and replies of other calls, to which the arguments refer, come along."""
        worker = self._workers[work.member]
        with self._answering(work.role, work.method) as reply, self._watched(work.method, work.deadline_s):
            args, kwargs = mapped(lambda value: _resolved(value, along), work.args, work.kwargs)
            if work.layouts is not None:
                dispatched = dispatch_call(type(worker), work.method, work.layouts, args, kwargs)
                reply.dispatched = without_calls(dispatched)
                if self._rank not in dispatched.ranks:
                    return reply
                args, kwargs = dispatched.calls[dispatched.ranks.index(self._rank)]
            output = getattr(worker, work.method)(*args, **kwargs)
            with MOVED.timed():
                reply.output = pack(output, work.reference_bytes)
            reply.layout = worker.layout(work.mesh)
        return reply

    def close(self) -> None:
        """Let the workers go, the last one first: the first one holds the process group."""
        while self._workers:
            self._workers.popitem()[1].close()

    @contextmanager
    def _answering(self, role: str, call: str) -> Iterator[Reply]:
        """A reply that holds what is raised inside; the traceback goes to the log."""
        reply = Reply()
        MOVED.take()
        try:
            yield reply
        except CallFailed as error:
            reply.raised = error.raised
        except Exception as error:
            traceback.print_exc()
            sys.stderr.flush()
            reply.raised = Raised.of(error, rank=self._rank, call=call, role=role)
        finally:
            reply.moved = MOVED.take()


def without_calls(dispatched: Any) -> Any:
    """A dispatched call with all that collecting takes, and none of the arguments."""
    return replace(dispatched, calls=[])


def _resolved(value: Any, along: Sequence[Any]) -> Any:
    if isinstance(value, Result):
        return joined(along[value.start : value.stop], value.dispatched)
    with MOVED.timed():
        return unpack(value, along)


class _Watch:
    """Writes to the log where the main thread stands, shortly before the caller of what it does gives up.

    One thread for all calls: starting one for each would cost more than the call.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._due: tuple[float, str, float] | None = None  # when to speak, of what, and after how many seconds
        self._wakes, self._main = math.inf, threading.get_ident()
        threading.Thread(target=self._run, daemon=True).start()

    @contextmanager
    def __call__(self, call: str, deadline_s: float) -> Iterator[None]:
        """Watch what happens inside."""
        until = time.monotonic() + deadline_s * 0.9
        with self._changed:
            self._due = until, call, deadline_s * 0.9
            if until < self._wakes:
                self._wakes = until
                self._changed.notify()
        try:
            yield
        finally:
            self._due = None

    def _run(self) -> None:
        with self._changed:
            while True:
                self._changed.wait(None if self._wakes == math.inf else max(0.0, self._wakes - time.monotonic()))
                now, due = time.monotonic(), self._due
                if now < self._wakes:
                    continue
                if due and due[0] <= now:
                    self._say(*due[1:])
                    due = None
                self._wakes = due[0] if due else math.inf

    def _say(self, call: str, seconds: float) -> None:
        frame = sys._current_frames().get(self._main)
        stack = "".join(traceback.format_stack(frame)[-8:]) if frame else ""
        print(f"{call} has run for {seconds:.3g} s and is here:\n{stack}", file=sys.stderr, flush=True)


def _log_to(file: Path) -> None:
    """Send all output of this process, of libraries and of crashes too, to a file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        os.dup2(descriptor, number)
    os.close(descriptor)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(file=sys.stderr)
    print(f"-- {time.strftime('%Y-%m-%d %H:%M:%S')} process {os.getpid()} on {socket.gethostname()}", flush=True)


def last_lines(file: Path, count: int) -> list[str]:
    """The last lines of a log, without empty ones."""
    try:
        with file.open("rb") as log:
            log.seek(max(0, file.stat().st_size - 64 * 1024))
            lines = log.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    return [line for line in lines if line.strip()][-count:] if count else []


def default_log_dir() -> Path:
    """A folder for logs of this session where none was named."""
    session = ray.get_runtime_context().get_session_name()
    return Path(tempfile.gettempdir()) / "drivetrain-logs" / session
