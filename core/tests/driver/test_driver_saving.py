"""Checkpoints that are written while training goes on."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from driver_rig import Little, NoModels

from drivetrain.builtin.local_executor import LocalWorkerGroup
from drivetrain.contracts.mesh import RankLayout
from drivetrain.driver import checkpoints
from drivetrain.driver.session import Session
from drivetrain.driver.tracking import Tracking
from drivetrain.driver.trainer import Trainer
from drivetrain.errors import CheckpointError
from drivetrain.metrics import Mean
from drivetrain.workers import ActorRolloutRefWorker


class Backend:
    """Its one weight is the step that the session is at; ``write`` is called before a file is written."""

    layout, offloads = RankLayout(), frozenset[str]()

    def __init__(self, session: NoModels) -> None:
        self.session = session
        self.write: Callable[[str], None] = lambda weight: None

    def snapshot(self) -> Callable[[Path], None]:
        weight = str(self.session.progress.step)

        def write(folder: Path) -> None:
            (folder / "weight").write_text("")
            self.write(weight)
            (folder / "weight").write_text(weight)

        return write

    def load(self, folder: Path) -> None:
        self.session.loaded = (folder / "weight").read_text()


class OneWorker(NoModels):
    """A session whose one worker has such a backend."""

    save_models, models_written, load_models = Session.save_models, Session.models_written, Session.load_models

    def __init__(self, run: Any) -> None:
        super().__init__(run)
        worker = ActorRolloutRefWorker(run, "actor")
        worker.backends["actor"] = self.backend = Backend(self)
        self.policy = LocalWorkerGroup(worker)

    def _groups(self) -> list[LocalWorkerGroup]:
        return [self.policy]


@pytest.fixture
def trainer(little: Little, tmp_path: Path):
    def make(*overrides: str, resume: Path | None = None, run_dir: str = "run") -> Trainer:
        run = little.config("trackers=[]", f"trainer.run_dir={tmp_path / run_dir}", "trainer.save_every=2",
                            "trainer.save_in_background=true", *overrides)  # fmt: skip
        session, tracking = OneWorker(run), Tracking(run)
        tracking.progress = session.progress
        made = Trainer(session, tracking, run.trainer.run_dir)
        if resume is not None:
            made.resume(resume)
        return made

    return make


def at_step(made: Trainer, step: int, act: Callable[[], None]) -> None:
    """Let something happen while the algorithm learns in a step."""
    learn = made.algorithm.learn

    def learning(roles: Any, batch: Any) -> Any:
        if made.session.progress.step == step:
            act()
        return learn(roles, batch)

    made.algorithm.learn = learning


def steps(run_dir: Path) -> list[int]:
    """Of the complete checkpoints, each of which holds the weight and the state of its step."""
    found = checkpoints.complete(run_dir)
    states = [checkpoints.read_state(folder) for folder in found]
    for folder, state in zip(found, states):
        assert not checkpoints.damage(folder)
        assert (folder / "actor" / "weight").read_text() == str(state["step"])
        assert state["algorithm"]["total"] == state["prompts"]["position"] == 2 * state["step"]
    return [state["step"] for state in states]


def hold(made: Trainer, step: int) -> tuple[threading.Event, threading.Event]:
    """Hold back the file of a step; returns an event that tells that it was begun, and one that lets it go on."""
    begun, go = threading.Event(), threading.Event()

    def write(weight: str) -> None:
        if weight == str(step):
            begun.set()
            assert go.wait(60)

    made.session.backend.write = write
    return begun, go


def test_training_goes_on_while_files_are_written(trainer, tmp_path: Path) -> None:
    made, told = trainer("trainer.steps=5", "trainer.keep_checkpoints=9"), []
    made.tracking.checkpoint_saved = lambda event: told.append((event.step, event.folder.name))
    begun, go = hold(made, 2)

    def during() -> None:
        assert begun.wait(60) and steps(tmp_path / "run") == [] == told
        go.set()

    at_step(made, 3, during)
    assert made.train().steps_done == 5
    assert steps(tmp_path / "run") == [2, 4, 5]
    assert told == [(step, f"step-{step:06d}") for step in (2, 4, 5)]


def test_a_checkpoint_is_put_in_its_place_before_the_next_is_begun(trainer, tmp_path: Path) -> None:
    made, seen = trainer("trainer.save_every=1", "trainer.keep_checkpoints=9"), []
    made.session.backend.write = lambda weight: seen.append(steps(tmp_path / "run"))
    made.train()
    assert seen == [[], [1], [1, 2], [1, 2, 3]] and steps(tmp_path / "run") == [1, 2, 3, 4]


def test_a_checkpoint_that_is_written_does_not_wait_for_the_next_save(trainer, tmp_path: Path) -> None:
    made, told = trainer("trainer.save_every=4", "trainer.steps=8"), []
    made.tracking.checkpoint_saved = lambda event: told.append(event.step)

    def placed() -> None:
        deadline = time.monotonic() + 60
        while steps(tmp_path / "run") != [4]:
            assert time.monotonic() < deadline

    at_step(made, 5, lambda: made.session.models_written(wait=True))
    at_step(made, 6, placed)
    at_step(made, 7, lambda: told.append("step 7"))
    made.train()
    assert told == [4, "step 7", 8]


@pytest.mark.parametrize("which, kept", [("highest", [2, 5]), ("lowest", [3, 5])])
def test_the_newest_and_the_best_are_kept(trainer, tmp_path: Path, which: str, kept: list[int]) -> None:
    made = trainer("trainer.save_every=1", "trainer.steps=5", "trainer.keep_checkpoints=1",
                   "trainer.best_metric=train/value", f"trainer.best_is={which}")  # fmt: skip
    learn, values = made.algorithm.learn, iter([1.0, 3.0, 0.5, 3.0, 2.0])
    made.algorithm.learn = lambda roles, batch: {**learn(roles, batch), "value": Mean(next(values), 1)}
    made.train()
    assert steps(tmp_path / "run") == kept
    assert (tmp_path / "run" / "checkpoints" / "best").resolve().name == f"step-{kept[0]:06d}"


def no_room(*_: Any) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("step", [2, 4])  # of which the last is written when all steps are done
def test_files_that_cannot_be_written_end_the_run(trainer, tmp_path: Path, step: int) -> None:
    made = trainer()
    made.session.backend.write = lambda weight: no_room() if weight == str(step) else None
    with pytest.raises(CheckpointError, match=rf"step {step} could not be written: .*No space left.*step-00000{step}"):
        made.train()
    assert steps(tmp_path / "run") == [2] * (step == 4)


def test_checksums_that_cannot_be_written_end_the_run(trainer, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(checkpoints, "commit", no_room)
    with pytest.raises(CheckpointError, match="step 2 could not be written: .*No space left"):
        trainer().train()
    assert steps(tmp_path / "run") == []


@pytest.mark.parametrize("fault", [None, no_room])
def test_a_step_that_fails_does_not_cost_the_checkpoint_before_it(trainer, tmp_path: Path, capsys, fault) -> None:
    made, failed = trainer(), threading.Event()

    def write(weight: str) -> None:
        assert failed.wait(60)
        if fault:
            fault()

    def fail() -> None:
        failed.set()
        raise ArithmeticError("the step")

    made.session.backend.write = write
    at_step(made, 3, fail)
    with pytest.raises(ArithmeticError, match="the step"):
        made.train()
    said = capsys.readouterr().err
    assert steps(tmp_path / "run") == [2] * (fault is None)
    assert said.startswith("warning: step 3: the checkpoint of step 2, which was being written, is lost") == bool(fault)


def test_an_interrupt_loses_only_what_is_being_written(trainer, tmp_path: Path) -> None:
    made = trainer("trainer.steps=6")
    begun, _ = hold(made, 4)

    def interrupt() -> None:
        assert begun.wait(60)
        raise KeyboardInterrupt

    at_step(made, 5, interrupt)
    with pytest.raises(KeyboardInterrupt):
        made.train()
    assert steps(tmp_path / "run") == [2]


def train_until_killed(made: Trainer, pipe: int) -> None:
    def write(weight: str) -> None:
        if weight == "4":
            os.write(pipe, b"!")
            threading.Event().wait()

    made.session.backend.write = write
    made.train()


def test_a_run_that_is_killed_while_it_writes_goes_on_from_the_checkpoint_before(trainer, tmp_path: Path) -> None:
    reading, writing = os.pipe()
    made = trainer("trainer.steps=6")
    process = multiprocessing.get_context("fork").Process(target=train_until_killed, args=(made, writing))
    process.start()
    os.close(writing)
    assert os.read(reading, 1) == b"!"
    process.kill()
    process.join()
    os.close(reading)
    run_dir, said = tmp_path / "run", list[str]()
    assert process.exitcode == -signal.SIGKILL
    assert [path.name for path in sorted((run_dir / "checkpoints").iterdir())] == [".step-000004.part", "step-000002"]
    found = checkpoints.find(run_dir, said.append)
    assert found.name == "step-000002" and not said
    made = trainer("trainer.steps=6", resume=found)
    assert made.session.loaded == "2"
    result = made.train()
    assert (result.steps_done, result.last_metrics["train/total"]) == (6, 12) and steps(run_dir) == [4, 6]
    assert not list((run_dir / "checkpoints").glob(".*"))
