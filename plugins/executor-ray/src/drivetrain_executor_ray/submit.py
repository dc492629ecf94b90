"""The command ``drivetrain submit``: a run as a job of a Ray cluster."""

from __future__ import annotations

import asyncio
import shlex
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer
import yaml

from drivetrain import RunConfig, UserError, get_registry, load_config

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

ON_RAY = ("executor.name=ray", "executor.address=auto")
STOP_WAIT_S = "600"  # between SIGTERM and SIGKILL of a job that is stopped: a run ends its step and saves first


def submit(
    config: Annotated[Path, typer.Argument(help="YAML config.", show_default=False)],
    overrides: Annotated[
        Optional[list[str]], typer.Argument(help="section.key=value, over the file.", show_default=False)
    ] = None,
    address: Annotated[str, typer.Option(help="Job server of the cluster.")] = "http://127.0.0.1:8265",
    working_dir: Annotated[
        Optional[Path], typer.Option(help="Folder that is copied to the cluster; relative paths are below it.")
    ] = None,
    runtime_env: Annotated[Optional[Path], typer.Option(help="YAML file with a Ray runtime environment.")] = None,
    resume: Annotated[
        Optional[str], typer.Option(help="Continue: 'auto' for the run folder's newest checkpoint, or a path.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Move an earlier run of that folder aside.")] = False,
    wait: Annotated[bool, typer.Option(help="Show the output, and exit as the run does.")] = False,
) -> int:
    """Train on a Ray cluster as one of its jobs.

    The config is checked here first, with the plugins that are installed here. Without a working directory, config and
    relative paths have to be on a file system that the cluster shares with this folder.
    """
    overrides = [*(overrides or []), *ON_RAY]
    run = load_config(config, overrides, get_registry()).run
    environment = _environment(runtime_env, working_dir)
    arguments = [*overrides, *([f"--resume={resume}"] if resume else []), *["--overwrite"] * overwrite]
    command = entrypoint(config, arguments, run, working_dir)
    client = _client(address)
    job = client.submit_job(entrypoint=command, runtime_env=environment)
    print(f"submitted {job}\n"
          f"  follow it  ray job logs --follow {job} --address {address}\n"
          f"  stop it    ray job stop {job} --address {address}", flush=True)  # fmt: skip
    return follow(client, job) if wait else 0


def entrypoint(config: Path, arguments: Sequence[str], run: RunConfig, working_dir: Path | None) -> str:
    """The command line that the cluster runs: in a copy of the working directory, or else in this very folder.

    Raises:
        UserError: the config is outside the working directory, or the run folder inside its copy.
    """
    if working_dir is None:
        where = f"cd {shlex.quote(str(Path.cwd()))} && "
    else:
        where, root = "", working_dir.resolve()
        if not config.resolve().is_relative_to(root):
            raise UserError("the config is not in the working directory", where=str(config),
                            mend=f"put it below {working_dir}")  # fmt: skip
        config = config.resolve().relative_to(root)
        if not run.trainer.run_dir.is_absolute():
            raise UserError(f"{run.trainer.run_dir} would be in the copy of the working directory, which Ray removes",
                            where="trainer.run_dir", mend="set an absolute path, on a file system that all nodes share",
                            )  # fmt: skip
    return where + shlex.join(["exec", "drivetrain", "train", str(config), *arguments])


def _environment(file: Path | None, working_dir: Path | None) -> dict[str, Any]:
    """Ray's runtime environment of the job."""
    found: dict[str, Any] = {}
    if file is not None:
        try:
            read = yaml.safe_load(file.read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError) as error:
            raise UserError(f"cannot read the runtime environment: {error}", where=str(file)) from error
        if not isinstance(read, dict):
            raise UserError("a runtime environment is a mapping", where=str(file))
        found |= read
    if working_dir is not None:
        if not working_dir.is_dir():
            raise UserError("there is no such folder", where=str(working_dir), mend="set --working-dir")
        found["working_dir"] = str(working_dir)
    found["env_vars"] = {"RAY_JOB_STOP_WAIT_TIME_S": STOP_WAIT_S, **(found.get("env_vars") or {})}
    return found


def _client(address: str) -> JobSubmissionClient:
    """Raises UserError: nothing answers, or a package is missing."""
    from ray.job_submission import JobSubmissionClient

    try:
        return JobSubmissionClient(address)
    except (ConnectionError, RuntimeError) as error:
        if "ray[default]" in str(error):
            raise UserError("jobs need packages of Ray's that are not installed", where="drivetrain submit",
                            mend="pip install 'drivetrain-executor-ray[submit]'") from error  # fmt: skip
        raise UserError(f"no job server answers: {str(error).splitlines()[0]}", where=address,
                        mend="set --address; ray start --head prints that of the dashboard, which has to be installed "
                        "there: pip install 'ray[default]'") from error  # fmt: skip


def follow(client: JobSubmissionClient, job: str) -> int:
    """Show the output of a job; returns its exit code, 130 if it was stopped. An interrupt leaves the job alone."""
    try:
        _show_output(client, job)
        info = client.get_job_info(job)
    except KeyboardInterrupt:
        print(f"{job} goes on, and is no longer followed", file=sys.stderr)
        return 130
    print(f"{job}: {info.status.value.lower()}", file=sys.stderr)
    return {"SUCCEEDED": 0, "STOPPED": 130}.get(info.status.value, info.driver_exit_code or 1)


def _show_output(client: JobSubmissionClient, job: str) -> None:
    """Print what a job writes until it ends. Another thread has the connection, so that an interrupt is heeded at once,
    whatever that does."""
    errors: list[BaseException] = []
    printing = threading.Lock()

    async def show() -> None:
        async for text in client.tail_job_logs(job):
            with printing:
                print(text, end="", flush=True)

    def run() -> None:
        try:
            asyncio.run(show())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(0.2)
    except KeyboardInterrupt:
        printing.acquire()  # and never let go: nothing is printed while Python ends
        raise
    if errors:
        raise errors[0]
