from __future__ import annotations

import gc
import os
import time
from pathlib import Path

import pytest

from drivetrain_tasks.side_process import SideProcess, Stuck

SOURCE = """
import os, time

def work(request):
    print("noise on standard output")
    if "sleep" in request:
        time.sleep(request["sleep"])
    if "exit" in request:
        os._exit(3)
    if "exit_once" in request and not os.path.exists(request["exit_once"]):
        open(request["exit_once"], "w").close()
        os._exit(3)
    return {"pid": os.getpid(), "twice": request["n"] * 2}
"""


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SideProcess:
    (tmp_path / "side_work.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    return SideProcess("side_work:work", {"n": 0})


def test_calls_go_to_one_process(process: SideProcess) -> None:
    replies = [process.call({"n": n}, 20) for n in (1, 2)]
    assert [reply["twice"] for reply in replies] == [2, 4]
    assert len({reply["pid"] for reply in replies} | {os.getpid()}) == 2


def test_an_error_comes_back_and_the_process_stays(process: SideProcess) -> None:
    pid = process.call({"n": 1}, 20)["pid"]
    with pytest.raises(RuntimeError, match="KeyError: 'n'"):
        process.call({}, 20)
    assert process.call({"n": 1}, 20)["pid"] == pid


@pytest.mark.parametrize("request_", [{"n": 1, "sleep": 60}, {"n": 1, "exit": True}])
def test_a_stuck_or_dead_process_is_replaced(process: SideProcess, request_: dict[str, object]) -> None:
    pid = process.call({"n": 1}, 20)["pid"]
    with pytest.raises(Stuck):
        process.call(request_, 0.5)
    reply = process.call({"n": 3}, 20)
    assert reply["twice"] == 6 and reply["pid"] != pid


def test_a_process_that_ended_is_tried_again_once(process: SideProcess, tmp_path: Path) -> None:
    assert process.call({"n": 3, "exit_once": str(tmp_path / "mark")}, 20)["twice"] == 6
    with pytest.raises(Stuck, match="ended with code 3"):
        process.call({"n": 3, "exit": True}, 20)


def test_a_process_that_does_not_start_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="did not start"):
        SideProcess("no_such_module:work", {"n": 0}).call({}, 20)


def test_the_process_ends_with_its_owner(process: SideProcess) -> None:
    owned = SideProcess("side_work:work", {"n": 0})
    pid = owned.call({"n": 1}, 20)["pid"]
    del owned
    gc.collect()
    deadline = time.monotonic() + 5
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
