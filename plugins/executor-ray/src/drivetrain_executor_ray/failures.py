"""Waiting for the ranks of a call, and the one error that comes of a failure."""

from __future__ import annotations

import itertools
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from drivetrain import WorkerError
from drivetrain_executor_ray.process import Raised, Reply, Whereabouts, last_lines
from drivetrain_executor_ray.transport import MOVED

GRACE_S = 2.0  # after the first sign of a failure, for the sign of its cause: a death breaks the calls of others


@dataclass(frozen=True, kw_only=True)
class Rank:
    """A process as messages name it."""

    rank: int
    place: Whereabouts
    log_file: Path


class CallFailure(Exception):
    """What went wrong with a call, on which rank; the group makes a WorkerError of it.

    Attributes:
        beside: the call, if it is another one than the one that is waited for.
    """

    def __init__(
        self, rank: int, how: str, *, raised: Raised | None = None, cause: BaseException | None = None,
        beside: Any = None,
    ) -> None:  # fmt: skip
        super().__init__(how)
        self.rank, self.how, self.raised, self.cause, self.beside = rank, how, raised, cause, beside


def ranks_by_node(ranks: Sequence[Rank], driver: str) -> str:
    """Ranks of each node, such as ``ranks 0-7 on 10.0.0.1, 8-15 on 10.0.0.2``; empty if all are on the driver's."""
    parts = []
    for node_id, group in itertools.groupby(ranks, key=lambda rank: rank.place.node_id):
        there = list(group)
        span = "-".join(map(str, dict.fromkeys((there[0].rank, there[-1].rank))))
        if len(there) < len(ranks) or node_id != driver:
            parts.append(f"{span} on {there[0].place.address}")
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(parts)}" if parts else ""


def replies(
    refs: Mapping[Any, int], deadline: float, limit_s: float, answered: Callable[[int, int], None],
    beside: Mapping[Any, tuple[int, Any]] = MappingProxyType({}),
) -> list[Reply]:  # fmt: skip
    """Wait for the replies of all ranks; they come in the order of ``refs``.

    Args:
        refs: what each rank was asked, and the rank.
        deadline: when to give up, on the clock ``time.monotonic``.
        limit_s: seconds that this allowed.
        answered: told how many have replied, and of how many.
        beside: what ranks of other groups were asked, the rank and the call: their failure is one of this call, too,
            for its ranks may be waiting for theirs.

    Raises:
        CallFailure: a rank died, raised or did not answer in time.
    """
    asked_beside = dict(beside)
    got: dict[Any, Reply] = {}
    failures: list[CallFailure] = []
    waiting = list(refs)
    until = deadline
    while waiting or (failures and asked_beside):
        done, left = ray.wait([*waiting, *asked_beside], num_returns=1, timeout=max(0.0, until - time.monotonic()))
        if not done:
            break
        waiting = [ref for ref in left if ref not in asked_beside]
        for ref in done:
            rank, call = asked_beside.pop(ref) if ref in asked_beside else (refs[ref], None)
            try:
                with MOVED.timed():
                    reply = ray.get(ref)
            except ray.exceptions.RayActorError as error:
                failures.append(CallFailure(rank, "died", cause=error, beside=call))
                until = 0.0  # nothing says more than a death
            except ray.exceptions.RayError as error:
                failures.append(CallFailure(rank, f"failed: {error}", cause=error, beside=call))
            else:
                if call is None:
                    got[ref] = reply
                if raised := reply.raised:
                    how = f"raised {raised.kind}: {raised.text}"
                    failures.append(CallFailure(raised.rank, how, raised=raised, beside=call))
        answered(len(got), len(refs))
        if failures:
            until = min(until, time.monotonic() + GRACE_S)
    if failures:
        raise next((failure for failure in failures if failure.how == "died"), failures[0])
    if waiting:
        ranks = sorted({refs[ref] for ref in waiting})
        others = f"; no answer from ranks {', '.join(map(str, ranks))} either" if len(ranks) > 1 else ""
        raise CallFailure(ranks[0], f"took longer than {limit_s:g} s" + others)
    return [got[ref] for ref in refs]


def worker_error(
    failure: CallFailure, *, call: str, role: str, ranks: Sequence[Rank], log_lines: int,
    end: Callable[[], None],
) -> WorkerError:  # fmt: skip
    """End the workers and say what happened to which one, with the last lines of its log."""
    raised, rank = failure.raised, ranks[failure.rank]
    late = failure.how.startswith("took longer")
    end()
    try:
        log = _read_log(rank, log_lines)
    except Exception as unread:  # its node may be gone with it
        log = [f"(cannot be read: {type(unread).__name__})"]
    how = failure.how
    if how == "died":
        how = f"ended: process {rank.place.pid} died"
    error = WorkerError(
        how, role=raised.role if raised else role, rank=rank.rank, node=rank.place.address,
        call=raised.call if raised else call, log=log, log_file=str(rank.log_file),
        mend="raise executor.call_timeout_s if the call needs longer" if late else "",
        exit_code=raised.exit_code if raised else 1,
    )  # fmt: skip
    error.__cause__ = pickle.loads(raised.error) if raised and raised.error else failure.cause
    return error


def _read_log(rank: Rank, count: int) -> list[str]:
    """Read the end of a log where it lies."""
    if rank.place.node_id == ray.get_runtime_context().get_node_id():
        return last_lines(rank.log_file, count)
    there = NodeAffinitySchedulingStrategy(rank.place.node_id, soft=False)
    read = ray.remote(num_cpus=0)(last_lines).options(scheduling_strategy=there, max_retries=0)
    lines: list[str] = ray.get(read.remote(rank.log_file, count), timeout=5)
    return lines
