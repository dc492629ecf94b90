"""Runs as jobs of a cluster: what is refused before anything is sent, and one that is followed to its end."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from command_rig import environment, finishes, metrics_of, start

from drivetrain import UserError, get_registry, load_config
from drivetrain.testing.processes import marked_processes
from drivetrain_executor_ray.submit import entrypoint, follow, submit

MARK = f"submit-{os.getpid()}"
NO_SERVER = "http://127.0.0.1:1"


def test_the_command_line_of_a_job(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = load_config(config, [f"trainer.run_dir={tmp_path / 'run'}"], get_registry()).run
    monkeypatch.chdir(tmp_path)
    here = entrypoint(config, ["a.b=c d"], run, None)
    assert here == f"cd {tmp_path} && exec drivetrain train {config} 'a.b=c d'"
    assert entrypoint(config, [], run, config.parent) == "exec drivetrain train run.yaml"
    with pytest.raises(UserError, match="not in the working directory"):
        entrypoint(config, [], run, tmp_path)
    relative = load_config(config, ["trainer.run_dir=runs/a"], get_registry()).run
    with pytest.raises(UserError, match="which Ray removes"):
        entrypoint(config, [], relative, config.parent)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["algorithm.kl_coeff=1"], "kl_coeff"),
        ([], "a cluster that is there already has its CPUs"),  # the file sets executor.num_cpus
        (["executor.num_cpus=null", "--runtime-env", "no.yaml"], "cannot read the runtime environment"),
        (["executor.num_cpus=null", "--address", NO_SERVER], "no job server answers"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_sent(config: Path, arguments: list[str], said: str) -> None:
    process = start("submit", config, *arguments)
    out = finishes(process)
    assert process.returncode == 2, out
    assert out.startswith("error:") and said in out


def test_a_runtime_environment_that_is_none(config: Path, tmp_path: Path) -> None:
    (tmp_path / "env.yaml").write_text("- a")
    with pytest.raises(UserError, match="is a mapping"):
        submit(config, ["executor.num_cpus=null"], runtime_env=tmp_path / "env.yaml")
    with pytest.raises(UserError, match="no such folder"):
        submit(config, ["executor.num_cpus=null", f"trainer.run_dir={tmp_path}"], working_dir=tmp_path / "no")


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@pytest.fixture(scope="module")
def job_server() -> Iterator[str]:
    """The address of the job server of a cluster that is started as its user starts it."""
    pytest.importorskip("aiohttp", reason="jobs need ray[default]")
    folder = tempfile.mkdtemp(dir="/tmp", prefix="dt-")  # paths of sockets have to be short
    ports = dict(
        zip(("port", "dashboard-port", "dashboard-agent-listen-port", "ray-client-server-port"), free_ports(4))
    )
    command = [
        sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start", "--head", "--block",
        "--num-cpus=4", "--min-worker-port=0", "--max-worker-port=0", f"--temp-dir={folder}", "--disable-usage-stats",
        *(f"--{name}={number}" for name, number in ports.items()),
    ]  # fmt: skip
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = environment(A_MARK_OF_THIS_TEST=MARK, RAY_AUTH_MODE="disabled", PATH=path)
    process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = ("127.0.0.1", ports["dashboard-port"])
    until = time.monotonic() + 120
    while True:
        try:
            socket.create_connection(address, timeout=1).close()
            break
        except OSError:
            assert process.poll() is None and time.monotonic() < until, "the cluster did not start"
            time.sleep(0.2)
    yield "http://{}:{}".format(*address)
    process.terminate()
    process.wait(60)
    until = time.monotonic() + 30
    while marked_processes(MARK) and time.monotonic() < until:
        time.sleep(0.2)
    shutil.rmtree(folder, ignore_errors=True)
    assert marked_processes(MARK) == [], "processes of the cluster stayed behind"


def test_a_job_outlives_its_follower_stops_with_a_checkpoint_and_is_resumed(
    config: Path, tmp_path: Path, job_server: str
) -> None:
    from ray.job_submission import JobSubmissionClient

    run_dir = tmp_path / "run"
    arguments = (
        "submit", config, "executor.num_cpus=null", f"trainer.run_dir={run_dir}", "--address", job_server, "--wait",
    )  # fmt: skip
    follower = start(*arguments, "trainer.steps=100000", RAY_AUTH_MODE="disabled")
    assert follower.stdout is not None
    shown = list(itertools.takewhile(lambda line: "step 1/" not in line, follower.stdout))
    follower.send_signal(signal.SIGINT)
    out = finishes(follower)
    assert follower.returncode == 130, out
    assert any("placement: critic on 2 x cpu" in line for line in shown), "the output of the job is shown"
    job = "".join(shown).split("ray job stop ")[1].split()[0]
    assert f"{job} goes on" in out
    client = JobSubmissionClient(job_server)
    assert client.get_job_status(job) == "RUNNING"
    client.stop_job(job)
    while not client.get_job_status(job).is_terminal():
        time.sleep(0.2)
    assert client.get_job_status(job) == "STOPPED"
    assert "stopped after step" in client.get_job_logs(job), "the step was ended and saved"
    steps = metrics_of(run_dir)[-1]["step"] + 1
    resumed = start(*arguments, f"trainer.steps={steps}", "--resume", "auto", RAY_AUTH_MODE="disabled")
    out = finishes(resumed)
    assert resumed.returncode == 0, out
    assert f"finished: {steps} of {steps} steps" in out and out.rstrip().endswith("succeeded")


class Client:
    """A job server with one job that has ended."""

    def __init__(self, status: str, code: int | None) -> None:
        self.info = SimpleNamespace(status=SimpleNamespace(value=status), driver_exit_code=code)

    async def tail_job_logs(self, job: str) -> AsyncIterator[str]:
        yield f"output of {job}"

    def get_job_info(self, job: str) -> SimpleNamespace:
        return self.info


@pytest.mark.parametrize(
    ("status", "code", "expected"), [("SUCCEEDED", 0, 0), ("FAILED", 2, 2), ("FAILED", None, 1), ("STOPPED", None, 130)]
)
def test_exit_codes(status: str, code: int | None, expected: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert follow(Client(status, code), "a-job") == expected  # type: ignore[arg-type]
    told = capsys.readouterr()
    assert told.out == "output of a-job" and told.err == f"a-job: {status.lower()}\n"
