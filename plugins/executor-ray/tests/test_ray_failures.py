"""A worker that dies, raises or hangs: one error that says which, where and why, and nothing stays behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from ray_rig import Rows, config_of

from drivetrain import UserError, WorkerError
from drivetrain_executor_ray import Crew, RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, Settings


def rows(folder: Path, **settings: object) -> RayWorkerGroup:
    made = RayClassWithInitArgs(cls=Rows, config=config_of(folder), role="rows")
    settings = {"log_dir": folder / "logs", **settings}
    return RayWorkerGroup(RayResourcePool([2], use_gpu=False), made, "rows", settings=Settings(**settings), crew=Crew())


def gone(pids: list[int]) -> bool:
    """Whether no process of these ids runs; one that ended and was not collected by its parent counts as gone."""
    for pid in pids:
        status = Path(f"/proc/{pid}/stat")
        if status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z":
            return False
    return True


def failing(group: RayWorkerGroup, method: str, *args: object) -> WorkerError:
    """The error of a call, after which no process of the group runs."""
    pids = group.pid()
    with pytest.raises(WorkerError) as raised:
        group.call(method, *args)
    assert gone(pids), "a process stayed behind"
    return raised.value


def test_a_death_in_mid_call(cluster: None, folder: Path) -> None:
    group = rows(folder)
    pid = group.pid()[1]
    error = failing(group, "die_on", 1)
    assert (error.role, error.rank, error.call) == ("rows", 1, "die_on")
    assert error.node == group.ranks[1].place.address
    assert error.log[-1] == "last words"
    text = str(error)
    assert f"die_on ended: process {pid} died" in text and f"(rows rank 1 on {error.node})" in text
    assert str(folder / "logs" / "rows-rank1.log") in text


def test_an_exception_on_one_rank_while_others_wait_for_it(cluster: None, folder: Path) -> None:
    error = failing(rows(folder, log_lines=3), "raise_on", 1)
    assert (error.rank, error.call) == (1, "raise_on")
    assert "raise_on raised ValueError: rank 1 is broken" in str(error)
    assert len(error.log) == 3 and "ValueError: rank 1 is broken" in error.log[-1]
    assert isinstance(error.__cause__, ValueError)


def test_a_hang_ends_at_the_deadline_and_shows_where(cluster: None, folder: Path) -> None:
    error = failing(rows(folder, call_timeout_s=3.0, start_timeout_s=100), "hang_on", 1)
    assert (error.rank, error.call) == (1, "hang_on")
    assert "took longer than 3 s" in str(error) and "call_timeout_s" in str(error)
    assert any("time.sleep(3600)" in line for line in error.log)


def test_what_cannot_be_sent_is_still_named(cluster: None, folder: Path) -> None:
    error = failing(rows(folder), "unpicklable")
    assert "raised Unsendable: this stays here" in str(error)


def test_a_failure_reaches_whoever_waits_for_a_result_that_depends_on_it(cluster: None, folder: Path) -> None:
    group = rows(folder)
    first = group.call("raise_on", 0, blocking=False)
    second = group.call("hello", first, blocking=False)
    with pytest.raises(WorkerError) as raised:
        second.get()
    assert (raised.value.rank, raised.value.call) == (0, "raise_on")
    for again in (second.get, first.get, group.hello):
        with pytest.raises(WorkerError) as told:
            again()
        assert told.value is raised.value


def test_a_worker_that_cannot_be_made(cluster: None, folder: Path) -> None:
    crew = Crew()
    made = RayClassWithInitArgs(cls=Rows, config=None, role="rows")
    with pytest.raises(WorkerError, match="start raised AttributeError"):
        RayWorkerGroup(RayResourcePool([1], use_gpu=False), made, "broken", crew=crew)


def test_calls_that_are_wrong_stop_nothing(cluster: None, folder: Path) -> None:
    group = rows(folder)
    with pytest.raises(AttributeError, match="no_such|Rows"):
        group.no_such_method()
    with pytest.raises(TypeError, match="word"):
        group.call("hello", wrd="x")
    with pytest.raises(UserError, match="no workers are called 'critic'"):
        group.spawn(["critic"])
    assert group.hello() == ["0/2", "1/2"]
    group._processes.crew.end()
    group._processes.crew.end()


def test_bundles_are_given_back(cluster: None, folder: Path) -> None:
    import ray

    group = rows(folder)
    pids = group.pid()
    group._processes.crew.end()
    assert gone(pids)
    states = {entry["state"] for entry in ray.util.placement_group_table().values()}
    assert states <= {"REMOVED"}


def test_a_death_ends_calls_of_other_groups_that_are_under_way(cluster: None, folder: Path) -> None:
    """As when one group sends what another one receives, and both were called before either was waited for."""
    crew, made = Crew(), RayClassWithInitArgs(cls=Rows, config=config_of(folder), role="rows")
    settings = Settings(log_dir=folder / "logs")
    waits, dies = (
        RayWorkerGroup(RayResourcePool([1], use_gpu=False), made, name, settings=settings, crew=crew)
        for name in ("waits", "dies")
    )
    assert dies.begin("hello", "here ")() == "here 0/1"
    waiting, _ = waits.begin("sleep", 60.0), dies.begin("die_on", 0)
    with pytest.raises(WorkerError) as raised:
        waiting()
    assert (raised.value.role, raised.value.rank, raised.value.call) == ("dies", 0, "die_on")
