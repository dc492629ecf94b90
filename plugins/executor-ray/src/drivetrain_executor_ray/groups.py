"""Worker groups: the same workers in every process of a pool, called together."""

from __future__ import annotations

import functools
import inspect
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from drivetrain import DataProto, RankLayout, UserError, Worker, WorkerError, WorkerGroup, dispatch_call, registration
from drivetrain_executor_ray import crew as crews
from drivetrain_executor_ray.crew import Crew
from drivetrain_executor_ray.devices import keep_visible
from drivetrain_executor_ray.failures import CallFailure, Rank, ranks_by_node, replies, worker_error
from drivetrain_executor_ray.feasibility import address_key
from drivetrain_executor_ray.futures import FutureBatch, FutureResult, is_pending, waited
from drivetrain_executor_ray.pools import RayResourcePool, reserve
from drivetrain_executor_ray.process import (
    Member,
    Place,
    Process,
    Result,
    Work,
    default_log_dir,
    joined,
    without_calls,
)
from drivetrain_executor_ray.settings import Settings
from drivetrain_executor_ray.transport import MOVED, mapped, pack

if TYPE_CHECKING:
    from typing_extensions import Self

_START = "start"


class RayClassWithInitArgs:
    """A class of workers and what each is made with; rank and the like are added where it starts.

    Args:
        cls: derived from ``drivetrain.Worker``; what ``ray.remote`` made of such a class will do.
        args, kwargs: such as ``config=`` and ``role=``.
    """

    def __init__(self, cls: Any, *args: Any, **kwargs: Any) -> None:
        if made := getattr(cls, "__ray_metadata__", None):
            cls = getattr(made.modified_class, "__ray_actor_class__", made.modified_class)
        self.cls: type[Worker] = cls
        if not (isinstance(self.cls, type) and issubclass(self.cls, Worker)):
            raise UserError(f"{cls!r} is no class of workers", where="RayClassWithInitArgs",
                            mend="derive it from drivetrain.Worker")  # fmt: skip
        self.member = Member(cls=self.cls, args=args, kwargs=kwargs)


class ColocatedWorkers:
    """Workers that share a process, by the prefix under which each is called."""

    def __init__(self, class_dict: Mapping[str, RayClassWithInitArgs]) -> None:
        self.classes = dict(class_dict)


def create_colocated_worker_cls(class_dict: Mapping[str, RayClassWithInitArgs]) -> ColocatedWorkers:
    """Several workers in one process and on one device; see :meth:`RayWorkerGroup.spawn`."""
    if not class_dict:
        raise UserError("no workers to colocate", where="create_colocated_worker_cls")
    return ColocatedWorkers(class_dict)


class _Processes:
    """The processes of a group, in the order of ranks."""

    def __init__(self, pool: RayResourcePool, members: dict[str, Member], name: str, settings: Settings, crew: Crew):
        self.settings, self.crew, self.role = settings, crew, name
        self.ranks: list[Rank] = []
        try:
            crew.add([], reserve([pool], settings.start_timeout_s))
            self._create(pool)
            self._start(members)
        except BaseException:
            crew.end(orderly=False)
            raise

    def _create(self, pool: RayResourcePool) -> None:
        resource, share = pool.resource, 1 / pool.max_colocate_count
        options: dict[str, Any] = {"num_cpus": pool.cpus_per_process, "max_restarts": 0}
        if resource is not None:
            options |= {"num_gpus": share} if resource == "GPU" else {"resources": {resource: share}}
            options["runtime_env"] = {"env_vars": keep_visible()}
        remote = ray.remote(Process)
        self.actors: list[Any] = []
        for slot in pool.slots:
            groups_in = slot.reservation.groups_in
            groups_in[slot.bundle] = groups_in.get(slot.bundle, 0) + 1
            if groups_in[slot.bundle] > pool.max_colocate_count:
                raise UserError(f"{slot.reservation.what} has room for {pool.max_colocate_count} worker groups, and "
                                f"{self.role} is one more", where="max_colocate_count",
                                mend="raise it, or put the roles in one process (create_colocated_worker_cls)",
                                )  # fmt: skip
            assert slot.reservation.group is not None
            there = PlacementGroupSchedulingStrategy(slot.reservation.group, slot.bundle)
            actor = remote.options(scheduling_strategy=there, **options).remote(resource)
            self.actors.append(actor)
            self.crew.add([actor], [])

    def _start(self, members: dict[str, Member]) -> None:
        settings = self.settings
        timeout_s = settings.start_timeout_s
        asked = {actor.where.remote(): number for number, actor in enumerate(self.actors)}
        done, waiting = ray.wait(list(asked), num_returns=len(asked), timeout=timeout_s)
        if waiting:
            raise UserError(f"{len(waiting)} of {len(asked)} processes of {self.role} did not start within "
                            f"{timeout_s:g} s", where="executor.start_timeout_s")  # fmt: skip
        places = ray.get(list(asked))
        self.crew.watch(places)
        order = sorted(range(len(places)), key=lambda n: (address_key(places[n].address), places[n].device, n))
        self.actors = [self.actors[number] for number in order]
        places = [places[number] for number in order]
        log_dir = settings.log_dir or default_log_dir()
        self.ranks = [Rank(rank=rank, place=place, log_file=log_dir / f"{self.role}-rank{rank}.log")
                      for rank, place in enumerate(places)]  # fmt: skip
        sent, path = ray.cloudpickle.dumps(members), [str(Path(folder).absolute()) for folder in sys.path]
        on_node: dict[str, int] = {}
        asked = {}
        for rank, (actor, place) in enumerate(zip(self.actors, places)):
            number = on_node[place.node_id] = on_node.get(place.node_id, -1) + 1
            stand = Place(
                rank=rank, world_size=len(places), local_rank=number if place.device < 0 else place.device,
                master_address=places[0].address, master_port=places[0].port, timeout_s=settings.call_timeout_s,
                log_file=self.ranks[rank].log_file,
            )  # fmt: skip
            asked[actor.start.remote(self.role, sent, path, stand)] = rank
        self.wait(asked, _START, time.monotonic() + timeout_s, timeout_s, self.role)

    def wait(
        self, refs: Mapping[Any, int], call: str, deadline: float, limit_s: float, role: str,
        answered: Callable[[int, int], None] = WorkerGroup.answered,
    ) -> list[Any]:  # fmt: skip
        """The replies of ranks; a failure ends the whole crew."""
        if self.crew.failure is None:
            try:
                return replies(refs, deadline, limit_s, answered, self._beside())
            except CallFailure as failure:
                if (other := failure.beside) is not None:
                    self.crew.failure = other.error(failure)
                else:
                    self.crew.failure = self.error(failure, call, role)
        raise self.crew.failure  # here, for its cause is what the worker raised

    def _beside(self) -> dict[Any, tuple[int, Pending]]:
        """What the ranks of other processes of the crew were asked and have not been waited for."""
        calls = [pending for pending in self.crew.under_way if pending.processes is not self]
        return {ref: (rank, pending) for pending in calls for ref, rank in pending.refs.items()}

    def error(self, failure: CallFailure, call: str, role: str) -> WorkerError:
        """What a failure is to the caller, after the crew has ended."""
        return worker_error(failure, call=call, role=role, ranks=self.ranks, log_lines=self.settings.log_lines,
                            end=functools.partial(self.crew.end, orderly=False))  # fmt: skip


class RayWorkerGroup(WorkerGroup):
    """Workers of one class, one in every process of a pool. Registered methods are attributes, too.

    Args:
        resource_pool: where they run.
        ray_cls_with_init: what runs there; colocated workers are called through :meth:`spawn`.
        name_prefix: name in messages and of log files.
        settings: deadlines, logs and data.
        crew: what ends together with this group; by default all groups of this process that have no other.

    Raises:
        UserError: the pool does not fit the cluster, or has no room for another group.
        WorkerError: a worker did not start.
    """

    def __init__(
        self,
        resource_pool: RayResourcePool,
        ray_cls_with_init: RayClassWithInitArgs | ColocatedWorkers,
        name_prefix: str = "",
        *,
        settings: Settings | None = None,
        crew: Crew | None = None,
    ) -> None:
        if not ray.is_initialized():
            from drivetrain_executor_ray.cluster import ray_init

            ray_init()
        if isinstance(ray_cls_with_init, ColocatedWorkers):
            self._members = ray_cls_with_init.classes
            self._own: str | None = None
        else:
            self._members, self._own = {"": ray_cls_with_init}, ""
        self._role = name_prefix or "_".join(filter(None, self._members)) or self._worker.__name__
        members = {name: made.member for name, made in self._members.items()}
        self._processes = _Processes(
            resource_pool, members, self._role, settings or Settings(), crew or crews.default()
        )
        self._prepare()

    def _prepare(self) -> None:
        self.where = ranks_by_node(self._processes.ranks, ray.get_runtime_context().get_node_id())
        self._layouts: dict[str, list[RankLayout]] = {}
        self._moved_bytes, self._moved_seconds = 0, 0.0
        self._counted: dict[Any, Any] = {}

    def spawn(self, prefix_set: Iterable[str]) -> dict[str, Self]:
        """The groups of colocated workers, by prefix; they share processes, and are of this group's class.

        Raises:
            UserError: a prefix is none of the class dict's.
        """
        groups = {}
        for prefix in prefix_set:
            if prefix not in self._members:
                raise UserError(
                    f"no workers are called {prefix!r}; there are {', '.join(self._members)}", where="spawn"
                )
            group = object.__new__(type(self))
            group.__dict__.update(_members=self._members, _own=prefix, _role=prefix, _processes=self._processes)
            group._prepare()
            groups[prefix] = group
        return groups

    @property
    def world_size(self) -> int:
        return len(self._processes.actors)

    @property
    def ranks(self) -> Sequence[Rank]:
        """Where each rank is."""
        return tuple(self._processes.ranks)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and self._own is not None:
            registration(self._worker, name)
            return functools.partial(self.call, name)
        raise AttributeError(f"a worker group has no {name!r}")

    @property
    def _worker(self) -> type[Worker]:
        if self._own is None:
            raise UserError(f"{self._role} are several workers in one process", where="RayWorkerGroup",
                            mend="call the groups that spawn returns")  # fmt: skip
        return self._members[self._own].cls

    def call(self, method: str, *args: Any, blocking: bool | None = None, **kwargs: Any) -> Any:
        """Call a registered method on the ranks.

        Args:
            blocking: False: return a future at once; a batch if the method returns one. Omitted: as it is registered.

        Raises:
            WorkerError: a worker died, raised or was not in time; all workers of the crew were ended.
            AttributeError, TypeError, ValueError: as :func:`drivetrain.dispatch_call` raises them.
        """
        registered = registration(self._worker, method)
        self.layouts(registered.mesh)
        waits = registered.blocking if blocking is None else blocking
        pending = self._submit(method, registered.mesh, args, kwargs, waits=waits)
        if waits:
            return pending.result()
        returned = inspect.signature(getattr(self._worker, method)).return_annotation
        return FutureBatch(pending) if returned in (DataProto, "DataProto") else FutureResult(pending)

    def begin(self, method: str, *args: Any, **kwargs: Any) -> Callable[[], Any]:
        begun: FutureBatch | FutureResult = self.call(method, *args, blocking=False, **kwargs)
        return begun.get

    def layouts(self, mesh: str) -> Sequence[RankLayout]:
        """Where each rank stands in a mesh, as it said with its last reply; the ranks are asked the first time.

        Raises:
            WorkerError: as :meth:`call` does.
        """
        if mesh not in self._layouts:
            self._layouts[mesh] = self._ask_layouts(mesh)
        return tuple(self._layouts[mesh])

    def _ask_layouts(self, mesh: str) -> list[RankLayout]:
        limit_s = self._processes.settings.call_timeout_s
        asked = {actor.layout.remote(self._own, mesh): rank for rank, actor in enumerate(self._processes.actors)}
        done, waiting = ray.wait(list(asked), num_returns=len(asked), timeout=limit_s)
        if waiting:
            late = CallFailure(min(asked[ref] for ref in waiting), f"took longer than {limit_s:g} s")
            raise self._processes.error(late, "layout", self._role)
        return list(ray.get(list(asked)))

    def _submit(self, method: str, mesh: str, args: Any, kwargs: Any, *, waits: bool) -> Pending:
        processes, layouts = self._processes, self._layouts[mesh]
        if processes.crew.failure is not None:
            raise processes.crew.failure
        settings = processes.settings
        along: list[Any] = []  # objects of Ray that all ranks get with the call
        upstream = [value.pending for value in (*args, *kwargs.values()) if is_pending(value)]
        common: dict[str, Any] = {
            "member": self._own, "role": self._role, "method": method, "mesh": mesh,
            "deadline_s": settings.call_timeout_s, "reference_bytes": settings.reference_bytes if waits else 0,
        }  # fmt: skip
        args, kwargs = mapped(lambda value: self._handed_on(value, along), args, kwargs)
        if upstream:
            args, kwargs = mapped(pack, args, kwargs)
            works = [Work(args=args, kwargs=kwargs, layouts=layouts, **common)] * self.world_size
            dispatched, ranks = None, list(range(self.world_size))
        else:
            split = dispatch_call(self._worker, method, layouts, args, kwargs)
            dispatched, ranks, works = without_calls(split), split.ranks, []
            for call in split.calls:
                args, kwargs = mapped(pack, *call)
                works.append(Work(args=args, kwargs=kwargs, layouts=None, **common))
        with MOVED.timed():
            refs = {processes.actors[rank].call.remote(work, *along): rank for rank, work in zip(ranks, works)}
        pending = Pending(self, method, mesh, refs, dispatched, upstream)
        processes.crew.under_way.append(pending)
        return pending

    def _handed_on(self, value: Any, along: list[Any]) -> Any:
        """An argument with its large columns, and the replies of calls under way that it stands for, in ``along``."""
        if not is_pending(value):
            return self._processes.crew.sent.attach(waited(value), along)
        pending, begin = value.pending, len(along)
        along += pending.refs
        return Result(begin, len(along), pending.dispatched)

    def take_metrics(self) -> dict[str, float]:
        driver = MOVED.take()
        moved, seconds = self._moved_bytes + driver.bytes, self._moved_seconds + driver.seconds
        self._moved_bytes, self._moved_seconds = 0, 0.0
        return {"transfer/bytes": float(moved), "transfer/s": seconds}

    def _received(self, found: Sequence[Any], ranks: Sequence[int], mesh: str) -> None:
        for reply, rank in zip(found, ranks):
            self._moved_bytes += reply.moved.bytes
            self._moved_seconds += reply.moved.seconds
            if reply.layout is not None:
                self._layouts[mesh][rank] = reply.layout


class Pending:
    """A call under way."""

    def __init__(
        self, group: RayWorkerGroup, method: str, mesh: str, refs: Mapping[Any, int], dispatched: Any,
        after: Sequence[Pending],
    ) -> None:  # fmt: skip
        self.refs, self.dispatched, self.done = dict(refs), dispatched, False
        self._group, self._method, self._mesh, self._after = group, method, mesh, after
        self._limit_s = group._processes.settings.call_timeout_s
        self.deadline: float = max([time.monotonic(), *(pending.deadline for pending in after)]) + self._limit_s
        self._replies: list[Any] | None = None
        self._result: Any = None

    def result(self) -> Any:
        """Wait for the result, which is remembered."""
        if not self.done:
            while self._replies is None:  # its processes answer calls in order
                next(call for call in self.processes.crew.under_way if call.processes is self.processes).settle()
            self._result = joined(self._replies or [], self.dispatched)
            self.done, self.refs, self._replies = True, {}, None
        return self._result

    @property
    def processes(self) -> _Processes:
        """That were asked."""
        return self._group._processes

    def error(self, failure: CallFailure) -> WorkerError:
        """What a failure of this call is to the caller, after the crew has ended."""
        return self.processes.error(failure, self._method, self._group._role)

    def settle(self) -> None:
        """Wait for the replies, after those of the calls that this one depends on, whose failure is the cause."""
        if self._replies is not None or self.done:
            return
        for pending in self._after:
            pending.settle()
        group, processes = self._group, self._group._processes
        self._replies = processes.wait(self.refs, self._method, self.deadline, self._limit_s, group._role,
                                       group.answered)  # fmt: skip
        processes.crew.under_way.remove(self)
        group._received(self._replies, list(self.refs.values()), self._mesh)
        self._after = ()
