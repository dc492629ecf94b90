from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from drivetrain_tasks import programs
from drivetrain_tasks.programs import GuardLost, Limits, Outcome, Refused, run_program

Run = Any


@pytest.fixture(params=[False, True], ids=["open", "isolated"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a program with small limits."""

    def call(source: str, *, tests: list[str] | None = None, stdin: str = "", **limits: Any) -> Outcome:
        small = {"time_limit_s": 10.0, "memory_mb": 512, "file_mb": 1, "output_kb": 100, "max_processes": 8}
        return run_program(source, Limits(**{**small, "isolate": request.param, **limits}), tests=tests, stdin=stdin)

    if request.param:
        try:
            call("")
        except Refused as error:
            pytest.skip(f"this machine grants no namespaces: {error}")
    call.isolated = request.param  # type: ignore[attr-defined]
    return call


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An argument by which processes are found; folders of programs are made in one that the test looks into."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return f"mark-{uuid4().hex}"


def alive(mark: str) -> list[int]:
    """Processes with the mark in their command line, other than zombies."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def wait_for(condition: Any, seconds: float = 30.0) -> bool:
    end = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < end:
        time.sleep(0.02)
    return bool(met)


# -- limits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["while True: pass", "import time\ntime.sleep(1000)", "9**9**9", "input()\n" * 9])
def test_time(run: Run, source: str) -> None:
    blocked = source.startswith("input")
    for tests in (None, ["assert True"]):
        outcome = run(source, tests=tests, time_limit_s=0.5)
        assert outcome.status == ("ended" if blocked else "time")
        assert outcome.exit_code == (1 if blocked else None)
        assert not outcome.passed


@pytest.mark.parametrize("source", ["x = 'a' * 10**9", "x = []\nwhile True: x.append(bytearray(10**7))"])
def test_memory(run: Run, source: str) -> None:
    run = partial(run, memory_mb=200)
    assert run(source).exit_code == 1
    assert not run(source, tests=["assert True"]).passed
    caught = f"try:\n    {source.splitlines()[0]}\n    {source.splitlines()[-1]}\nexcept MemoryError:\n    x = None"
    assert run(caught, tests=["assert x is None"]).passed == {0}


def test_output_is_bounded(run: Run) -> None:
    outcome = run("while True: print('a' * 1000)")
    assert outcome.status == "output"
    assert len(outcome.output) == 100 * 1024
    at_once = run("import os\nos.set_blocking(1, False)\nos.write(1, b'a' * 60000)\nprint('b' * 60000)")
    assert at_once.status in ("output", "ended")
    assert run("print('a' * 102399)").output == "a" * 102399 + "\n"
    assert run("while True: print('a' * 1000)", tests=["assert True"], time_limit_s=0.5).status == "time"


def test_reports_are_bounded(run: Run) -> None:
    flood = "import os\nwhile True:\n    for fd in range(3, 9):\n        try: os.write(fd, b'a' * 4096)\n" \
            "        except OSError: pass"  # fmt: skip
    outcome = run(flood, tests=["assert True"])
    assert (outcome.status, outcome.passed) == ("output", frozenset())


def test_files_are_bounded(run: Run) -> None:
    source = "with open('x', 'wb') as file:\n    file.write(bytes({}))"
    assert run(source.format(10**6)).exit_code == 0
    assert run(source.format(10**7)).exit_code == 1


# Each bomb ends by itself, if nothing else does.
BOMBS = {
    "quick": "import os, time\nend = time.time() + 3\nwhile time.time() < end: os.fork()",
    "sleeping": "import os, time\nfor _ in range(6): os.fork()\ntime.sleep(60)",
    "sessions": "import os, time\nfor _ in range(6):\n    if os.fork() == 0: os.setsid()\ntime.sleep(60)",
    "orphans": "import os, time\nfor _ in range(40):\n    if os.fork() == 0:\n"
               "        os.setsid()\n        if os.fork(): os._exit(0)\n        time.sleep(60)\n        os._exit(0)\n"
               "time.sleep(60)",
}  # fmt: skip


@pytest.mark.parametrize("source", BOMBS.values(), ids=BOMBS)
def test_processes(run: Run, source: str) -> None:
    outcome = run(source, tests=["assert True"])
    assert (outcome.status, outcome.passed) == ("processes", frozenset())


def test_a_few_processes_and_threads_are_fine(run: Run) -> None:
    source = (
        "from concurrent.futures import ThreadPoolExecutor\nimport subprocess, sys\n"
        "with ThreadPoolExecutor(32) as pool: print(sum(pool.map(int, range(32))), flush=True)\n"
        "print(subprocess.run([sys.executable, '-c', 'print(5)'], capture_output=True, text=True).stdout)"
    )
    assert run(source, memory_mb=4096).output.split() == ["496", "5"]


# -- nothing is left ------------------------------------------------------------------------------------------------

CHILD = """
import os, signal, subprocess, sys
code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
children = [subprocess.Popen([sys.executable, "-c", code, {mark!r}], stdout=subprocess.PIPE, start_new_session=new)
            for new in (False, True)]
started = [child.stdout.readline() for child in children]
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, "-c", code, {mark!r}])
    os._exit(0)
"""


@pytest.mark.parametrize("end", ["", "import os; os._exit(0)", "while True: pass", "os.abort()"])
def test_children_end_with_the_program(run: Run, mark: str, tmp_path: Path, end: str) -> None:
    outcome = run(CHILD.format(mark=mark) + end, tests=["assert started == [b'1\\n', b'1\\n']"], time_limit_s=5)
    assert outcome.passed == (frozenset() if end else {0})
    assert alive(mark) == []
    assert list(tmp_path.iterdir()) == []


LOOK = """
import glob
count = 0
for path in glob.glob("/proc/[0-9]*/cmdline"):
    try:
        count += {mark!r} in open(path, errors="replace").read()
    except OSError:
        pass
print("found", count)
"""


def test_children_are_there_until_then(run: Run, mark: str) -> None:
    lines = run(CHILD.format(mark=mark) + LOOK.format(mark=mark)).output.splitlines()  # a grandchild prints, too
    assert [int(line.split()[1]) for line in lines if line.startswith("found")][0] >= 2
    assert alive(mark) == []


TRAINER = """
import sys
from drivetrain_tasks.programs import Limits, run_program
limits = Limits(time_limit_s=600, memory_mb=512, file_mb=1, output_kb=1, max_processes=8, isolate=sys.argv[1] == "True")
run_program(sys.argv[2], limits, tests=["assert True"])
"""


def test_programs_end_with_the_trainer(run: Run, mark: str, tmp_path: Path) -> None:
    source = CHILD.format(mark="-".join(("child", mark))) + "while True: pass"
    command = [sys.executable, "-c", TRAINER, str(run.isolated), source]
    trainer = subprocess.Popen(command, env={**os.environ, "TMPDIR": str(tmp_path)})
    try:
        assert wait_for(lambda: len(set(alive(f"child-{mark}")) - {trainer.pid}) >= 3)
    finally:
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
    assert wait_for(lambda: not alive(f"child-{mark}"))
    assert wait_for(lambda: not list(tmp_path.iterdir()))


@pytest.mark.parametrize("signal_", ["SIGKILL", "SIGSTOP"])
def test_a_program_that_ends_its_guard(run: Run, monkeypatch: pytest.MonkeyPatch, signal_: str) -> None:
    if not run.isolated:
        monkeypatch.setattr(programs, "ENDING_S", 1.0)
    outcome = run(
        f"import os, signal, time\nos.kill(os.getppid(), signal.{signal_})\ntime.sleep(60)",
        tests=["assert True"],
        time_limit_s=0.5,
    )
    assert not outcome.passed
    assert outcome.status == ("time" if run.isolated else "guard")


def test_a_guard_that_is_lost_is_the_programs_fault_only_where_it_can_be() -> None:
    said = f"ready {2**22 + 1}\n"  # above the highest process id
    assert programs._outcome(said, isolated=False) == Outcome(status="guard")
    with pytest.raises(GuardLost):
        programs._outcome(said, isolated=True)


# -- what a program sees --------------------------------------------------------------------------------------------


def test_the_environment_does_not_leak(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = f"secret-{uuid4().hex}"
    monkeypatch.setenv("SOME_API_KEY", secret)
    outcome = run("import os\nprint(dict(os.environ))\nprint(os.getcwd() == os.environ['HOME'], os.listdir())")
    assert "OMP_NUM_THREADS" in outcome.output
    assert secret not in outcome.output
    assert outcome.output.splitlines()[1] == "True []"
    everywhere = (
        "import glob\nfor path in glob.glob('/proc/[0-9]*/environ'):\n    try: print(open(path).read())\n"
        "    except OSError: pass"
    )
    if run.isolated:
        assert secret not in run(everywhere, output_kb=10**5).output


def test_no_descriptor_of_the_trainer_is_open(run: Run) -> None:
    source = "import os\nprint([fd for fd in range(3, 256) if os.path.exists(f'/proc/self/fd/{fd}')])"
    assert run(source).output == "[]\n"


@pytest.fixture
def port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_the_network(run: Run, port: int) -> None:
    outcome = run(f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 5)")
    assert outcome.exit_code == (1 if run.isolated else 0)


def test_isolated_programs_have_no_privileges_and_reach_no_process(run: Run) -> None:
    if not run.isolated:
        pytest.skip("of isolated programs")
    process = subprocess.Popen(["sleep", "600"])
    try:
        source = "import os\nprint([line for line in open('/proc/self/status') if line.startswith('CapEff')])\n"
        outcome = run(f"{source}os.kill({process.pid}, 9)")
        assert "0000000000000000" in outcome.output
        assert outcome.exit_code == 1
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()
