"""The loop: what is saved when, how it stops, and how it goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from driver_rig import Little, NoModels

from drivetrain.contracts.tracker import RunResult
from drivetrain.driver import checkpoints
from drivetrain.driver.roles import PromptsRole, Roles
from drivetrain.driver.tracking import Tracking
from drivetrain.driver.trainer import Trainer
from drivetrain.errors import CheckpointError, UserError
from drivetrain.metrics import Mean
from drivetrain.protocol import DataProto


class Stop:
    """A signal that arrives after so many questions whether one has."""

    def __init__(self, after: int) -> None:
        self.after = after

    def __call__(self) -> bool:
        self.after -= 1
        return self.after < 0


@pytest.fixture
def trainer(little: Little, tmp_path: Path):
    def make(*overrides: str, resume: int | None = None) -> Trainer:
        run = little.config("trackers=[{name: jsonl}]", f"trainer.run_dir={tmp_path / 'run'}", *overrides)
        run.trainer.run_dir.mkdir(exist_ok=True)
        session = NoModels(run)
        tracking = Tracking(run)
        tracking.progress = session.progress
        made = Trainer(session, tracking, run.trainer.run_dir)
        if resume is not None:
            made.resume(checkpoints.folder_of(run.trainer.run_dir, resume))
        return made

    return make


def saved(folder: Path) -> list[int]:
    return [checkpoints.read_state(path)["step"] for path in checkpoints.complete(folder / "run")]


def logged(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def test_a_run_saves_as_planned_and_at_the_end(trainer, tmp_path: Path) -> None:
    result: RunResult = trainer("trainer.save_every=2", "trainer.steps=5", "trainer.keep_checkpoints=9").train()
    assert (result.status, result.steps_done, result.last_metrics["train/total"]) == ("finished", 5, 10)
    assert saved(tmp_path) == [2, 4, 5]
    assert logged(tmp_path) == [0, 1, 2, 3, 4, 5]


def test_some_steps_are_logged(trainer, tmp_path: Path) -> None:
    trainer("trainer.log_every=3", "trainer.steps=7").train()
    assert logged(tmp_path) == [0, 3, 6, 7]


@pytest.mark.parametrize("after", range(5))
def test_a_stop_that_comes_at_any_time_loses_no_step(trainer, tmp_path: Path, after: int) -> None:
    result = trainer().train(Stop(after))
    assert result.status == ("finished" if after == 4 else "interrupted")
    assert saved(tmp_path) == [result.steps_done] * (after > 0) and logged(tmp_path)[-1] == result.steps_done == after


def test_a_stop_that_comes_while_the_step_is_logged_is_obeyed_at_once(trainer, tmp_path: Path) -> None:
    made = trainer()
    requested = False
    write = made.tracking.metrics

    def metrics(step: int, numbers: dict[str, float]) -> None:
        nonlocal requested
        requested = requested or step == 2
        write(step, numbers)

    made.tracking.metrics = metrics
    result = made.train(lambda: requested)
    assert (result.status, result.steps_done) == ("interrupted", 2)
    assert saved(tmp_path) == [2]


def test_a_step_is_told_before_it_is_saved(trainer, tmp_path: Path) -> None:
    """So a run that is killed in between takes the step again, and no step is missing from the metrics."""
    made = trainer("trainer.save_every=1")
    told: list[list[int]] = []
    made.session.save_models = lambda folder, background: told.append(logged(tmp_path))
    made.train()
    assert told == [[0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4]]


def values(made: Trainer, numbers: list[float]) -> None:
    """Let the algorithm tell these values of a metric ``value``, a step each."""
    learn, left = made.algorithm.learn, iter(numbers)
    made.algorithm.learn = lambda roles, batch: {**learn(roles, batch), "value": Mean(next(left), 1)}


@pytest.mark.parametrize("which, best, kept", [("highest", 2, [2, 5]), ("lowest", 3, [3, 5])])
def test_the_best_checkpoint_is_kept_too(trainer, tmp_path: Path, which: str, best: int, kept: list[int]) -> None:
    made = trainer("trainer.save_every=1", "trainer.steps=5", "trainer.keep_checkpoints=1",
                   "trainer.best_metric=train/value", f"trainer.best_is={which}")  # fmt: skip
    values(made, [1.0, 3.0, 0.5, 3.0, 2.0])
    made.train()
    assert saved(tmp_path) == kept
    link = tmp_path / "run" / "checkpoints" / "best"
    assert link.is_symlink() and checkpoints.read_state(checkpoints.find(link, print))["step"] == best


def test_a_resumed_run_remembers_which_is_the_best(trainer, tmp_path: Path) -> None:
    settings = ("trainer.save_every=1", "trainer.keep_checkpoints=1", "trainer.best_metric=train/value")
    made = trainer(*settings)
    values(made, [2.0, 1.0])
    made.train(Stop(2))
    made = trainer(*settings, resume=2)
    values(made, [1.5, float("nan")])
    made.train()
    assert saved(tmp_path) == [1, 4]


def test_a_step_without_the_metric_cannot_be_the_best(trainer, tmp_path: Path, capsys) -> None:
    trainer("trainer.save_every=2", "trainer.best_metric=train/valeu", "trainer.keep_checkpoints=1").train()
    assert saved(tmp_path) == [4] and not (tmp_path / "run" / "checkpoints" / "best").exists()
    assert capsys.readouterr().err.splitlines() == [
        f"warning: step {step}: this checkpoint cannot be the best one: the step has no train/valeu" for step in (2, 4)
    ]


def test_what_goes_wrong_is_said_once(trainer, capsys) -> None:
    made = trainer("trainer.steps=9")
    learn, entropies = made.algorithm.learn, iter([1.0] * 4 + [0.001] * 5)
    made.algorithm.learn = lambda roles, batch: {**learn(roles, batch), "entropy": Mean(next(entropies), 1)}
    made.train()
    said = [line for line in capsys.readouterr().err.splitlines() if "entropy collapse" in line]
    assert len(said) == 1 and said[0].startswith("warning: step 9: entropy collapse: 0.001 nats a token after 0.8")


def test_a_resumed_run_goes_on_where_it_was(trainer, tmp_path: Path) -> None:
    trainer("trainer.save_every=1").train(Stop(3))
    made = trainer(resume=2)
    assert made.session.loaded == "2" and made.session.train_prompts.position == 4
    assert made.train().last_metrics["train/total"] == 8
    assert logged(tmp_path) == [0, 1, 2, 3, 4]


def test_a_run_that_never_saved_starts_over(trainer, tmp_path: Path) -> None:
    trainer().train(Stop(0))
    trainer().train()
    assert logged(tmp_path) == [0, 1, 2, 3, 4]


def test_a_finished_run_has_nothing_to_resume(trainer, tmp_path: Path) -> None:
    trainer().train()
    result = trainer(resume=4).train()
    assert (result.status, result.steps_done) == ("finished", 4) and logged(tmp_path) == [0, 1, 2, 3, 4]


def test_going_back_to_an_earlier_checkpoint_keeps_what_comes_of_it(trainer, tmp_path: Path) -> None:
    trainer("trainer.save_every=1", "trainer.keep_checkpoints=9").train()
    trainer("trainer.keep_checkpoints=1", resume=1).train(Stop(1))
    assert saved(tmp_path) == [2] and logged(tmp_path) == [0, 1, 2]


def test_a_checkpoint_of_another_algorithm_is_refused(trainer, tmp_path: Path) -> None:
    trainer().train()
    state = checkpoints.folder_of(tmp_path / "run", 4) / checkpoints.STATE_FILE
    state.write_text(state.read_text().replace('"count"', '"other"'))
    with pytest.raises(UserError, match="'other', not 'count'"):
        trainer(resume=4)


KEEP = """
    from drivetrain import AlgorithmSpec, hookimpl

    @hookimpl
    def drivetrain_algorithms():
        yield AlgorithmSpec(name="keep", summary="", factory="{package}.work:Keep")
"""
KEEPING = """
    import torch
    from drivetrain import Algorithm, DataProto
    from drivetrain.metrics import Mean

    class Keep(Algorithm):  # draws three prompts more a step, learns from the oldest four and keeps the others
        steps, kept = 0, None

        def collect(self, roles, prompts):
            self.steps += 1
            drawn = DataProto.concat([prompts, roles.prompts.draw(3)])
            values = torch.arange(5) / 7 + self.steps
            drawn = drawn.with_columns(value=values, uid=[f"{self.steps}-{row}" for row in range(5)])
            rows = drawn if self.kept is None else DataProto.concat([self.kept, drawn])
            self.kept = rows[4:]
            return rows[:4]

        def learn(self, roles, batch):
            return {"first": Mean(float(batch["value"][0]), 1)}

        def state_dict(self):
            return {"steps": self.steps} | ({} if self.kept is None else {"kept": self.kept})

        def load_state_dict(self, state):
            self.steps, self.kept = state["steps"], state.get("kept")
"""


@pytest.fixture
def keeper(little: Little, trainer):
    little.add("acme-keep", KEEP, {"work.py": KEEPING})

    def make(*overrides: str, resume: int | None = None) -> Trainer:
        made = trainer("algorithm.name=keep", "trainer.save_every=1", *overrides, resume=resume)
        made.session.roles = Roles(actor=None, text=None, prompts=PromptsRole(made.session.train_prompts))
        return made

    return make


def test_batches_in_the_state_of_an_algorithm_come_back_exactly(keeper, tmp_path: Path) -> None:
    whole = keeper(f"trainer.run_dir={tmp_path / 'whole'}")
    metrics = whole.train().last_metrics
    keeper().train(Stop(2))
    made = keeper(resume=2)
    assert made.algorithm.steps == 2 and len(made.algorithm.kept) == 2 and made.session.train_prompts.position == 10
    assert made.train().last_metrics["train/first"] == metrics["train/first"] == pytest.approx(3 + 2 / 7)
    assert made.algorithm.kept.equal(whole.algorithm.kept) and len(whole.algorithm.kept) == 4
    assert made.session.train_prompts.position == whole.session.train_prompts.position == 20
    state = checkpoints.folder_of(tmp_path / "run", 4)
    assert DataProto.load(state / "algorithm" / "kept").equal(made.algorithm.kept)
    assert checkpoints.read_state(state)["algorithm"] == {"steps": 4}


@pytest.mark.parametrize("spoil", [lambda path: path.write_bytes(b"half"), lambda path: path.unlink()])
def test_damage_to_such_a_batch_is_noticed(keeper, tmp_path: Path, spoil) -> None:
    keeper().train(Stop(2))
    newest = checkpoints.folder_of(tmp_path / "run", 2)
    spoil(newest / "algorithm" / "kept" / "columns.safetensors")
    said: list[str] = []
    assert checkpoints.find(tmp_path / "run", said.append) == checkpoints.folder_of(tmp_path / "run", 1)
    assert len(said) == 1 and "algorithm/kept/columns" in said[0]
    with pytest.raises(CheckpointError, match="damaged"):
        checkpoints.find(newest, said.append)


def test_a_batch_deeper_in_the_state_is_refused(keeper) -> None:
    made = keeper()
    made.algorithm.state_dict = lambda: {"kept": [DataProto.from_dict({"value": torch.ones(1)})]}
    with pytest.raises(TypeError, match="DataProto is not JSON serializable"):
        made.train()
