"""The two engines take turns, in one order; after an error in any step of it training and the next turn go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hybrid_rig as rig
import pytest

from drivetrain import RunError
from drivetrain.weights import WeightStream
from drivetrain_hybrid_engine import colocated
from drivetrain_hybrid_engine.colocated import State

PROMPTS = [(5, 6, 7), (9, 8, 7), (30, 31, 40)]

SYNC = ["offload optimizer", "onload parameters", "wake weights", "load", "gather", "offload optimizer parameters",
        "wake kv_cache"]  # fmt: skip
SLEEP = ["sleep weights kv_cache"]
BACK = ["onload optimizer parameters"]


@pytest.fixture
def pair(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> rig.Pair:
    """Engines that offload and sleep, and their journal."""
    real = colocated.offered
    monkeypatch.setattr(colocated, "offered", lambda *names: real(*names) | {"rollout.sleep"})
    journal = rig.Journal()
    made = rig.Pair(models["untied"], journal=journal, moves=("param", "optimizer"), bucket_bytes=5000)
    made.journal = journal
    return made


def learn(pair: rig.Pair, batch: Any) -> None:
    """One step of the trainer, as a worker takes it: all of it is brought, and left on the device."""
    pair.backend.onload(pair.backend.offloads)
    pair.update(batch)
    pair.journal.take()


def sampled(pair: rig.Pair) -> Any:
    """Rows to learn from, by the rollout."""
    return rig.as_batch(PROMPTS, pair.generate(PROMPTS))


def current(pair: rig.Pair) -> bool:
    """Whether the rollout has the trainer's weights; leaves the trainer on the device."""
    held = pair.held()
    pair.backend.onload(pair.backend.offloads)
    pair.journal.take()
    trained = pair.trained()
    pair.journal.take()
    return all(held[name].equal(trained[name]) for name in trained)


def test_a_turn_has_one_order(pair: rig.Pair) -> None:
    for turn in range(2):
        metrics = pair.hybrid.enter_generation(turn)
        assert pair.hybrid.state is State.GENERATING
        # a rollout that was just made has its memory, and gives it up before the weights come
        assert pair.journal.take() == ([] if turn else SLEEP) + SYNC
        assert {"wake_s", "bandwidth", "peak_bytes"} <= metrics.keys() and ("sleep_s" in metrics) is (turn == 0)
        batch = sampled(pair)
        assert pair.journal.take() == ["generate"]
        assert pair.backend.memory()["parameters"] == 0
        assert pair.hybrid.enter_training().keys() == {"sleep_s"} and pair.hybrid.state is State.TRAINING
        assert pair.journal.take() == SLEEP  # a worker brings what a call needs
        learn(pair, batch)
    assert pair.hybrid.enter_generation(2)["buckets"] > 1 and current(pair)


def test_a_program_has_the_trainer_back_at_the_end(pair: rig.Pair) -> None:
    for version in range(2):
        with pair.hybrid.generation(version) as metrics:
            assert metrics["buckets"] > 1
            batch = sampled(pair)
        assert pair.journal.take() == ([] if version else SLEEP) + [*SYNC, "generate", *SLEEP, *BACK]
        pair.update(batch)  # nothing has to be brought
    with pytest.raises(ValueError, match="inside"), pair.hybrid.generation(2):
        raise ValueError("inside")
    assert pair.journal.take() == [*SYNC, *SLEEP, *BACK] and pair.hybrid.state is State.TRAINING
    pair.journal.failing = {"wake weights"}
    with pytest.raises(RuntimeError, match="wake weights failed"), pair.hybrid.generation(3):
        raise AssertionError("there was nothing to generate with")
    assert pair.journal.take()[-1:] == BACK
    pair.update(batch)


def test_entering_what_one_is_in_does_nothing(pair: rig.Pair) -> None:
    pair.hybrid.enter_generation(0)
    pair.journal.take()
    assert pair.hybrid.enter_generation(0) == {}
    assert "sleep weights kv_cache" not in pair.journal.take() and pair.hybrid.state is State.GENERATING
    pair.hybrid.enter_training()
    pair.journal.take()
    assert pair.hybrid.enter_training() == {} and pair.journal.take() == []


def test_another_version_while_generating_goes_through_sleep(pair: rig.Pair) -> None:
    pair.hybrid.enter_generation(0)
    pair.journal.take()
    assert "sleep_s" in pair.hybrid.enter_generation(1)
    assert pair.journal.take() == SLEEP + SYNC


def test_transitions_that_make_no_sense_are_refused(pair: rig.Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = colocated.Colocated(pair.hybrid.config)
    for enter in (alone.enter_training, lambda: alone.enter_generation(0), alone.generation(0).__enter__):
        with pytest.raises(RunError, match="cannot begin: it is not attached to its two engines"):
            enter()
    with pytest.raises(RunError, match="engines cannot be attached: it is training"):
        pair.hybrid.attach(pair.backend, pair.rollout)

    def inside(stream: WeightStream, version: int) -> None:
        for enter in (pair.hybrid.enter_training, lambda: pair.hybrid.enter_generation(0),
                      pair.hybrid.generation(0).__enter__):  # fmt: skip
            with pytest.raises(RunError, match="cannot begin: it is in the middle of a switch"):
                enter()
        list(stream)

    with monkeypatch.context() as patch:
        patch.setattr(pair.rollout, "load_weights", inside)
        pair.hybrid.enter_generation(0)
    with pytest.raises(RunError, match="generation cannot begin: it is generating"), pair.hybrid.generation(1):
        pass
    assert pair.hybrid.state is State.GENERATING


RETREAT = ["offload optimizer parameters"]
FAILING = {
    "offload optimizer": RETREAT,
    "onload parameters": RETREAT,
    "wake weights": ["gather", *RETREAT, "sleep weights"],  # other ranks are not left waiting
    "load": ["gather", *RETREAT, "sleep weights"],
    "gather": [*RETREAT, "sleep weights"],
    "offload optimizer parameters": [*RETREAT, "sleep weights"],
    "wake kv_cache": [*RETREAT, "sleep weights kv_cache"],
}


@pytest.mark.parametrize("step", FAILING)
def test_after_an_error_training_and_the_next_turn_go_on(step: str, pair: rig.Pair) -> None:
    with pair.hybrid.generation(0):
        batch = sampled(pair)
    pair.update(batch)
    pair.journal.take()
    pair.journal.failing = {step}
    with pytest.raises(RuntimeError, match=f"{step} failed"):
        pair.hybrid.enter_generation(1)
    assert pair.journal.take() == SYNC[: SYNC.index(step) + 1] + FAILING[step]
    assert pair.hybrid.state is State.TRAINING and pair.backend.memory()["parameters"] == 0
    assert pair.hybrid.enter_training() == {} and pair.journal.take() == []  # it sleeps
    learn(pair, batch)
    pair.hybrid.enter_generation(1)
    assert pair.journal.take() == SYNC and pair.hybrid._synced
    assert current(pair)


def test_a_sleep_that_failed_is_made_up_for(pair: rig.Pair) -> None:
    pair.hybrid.enter_generation(0)
    batch = sampled(pair)
    for enter in (pair.hybrid.enter_training, lambda: pair.hybrid.enter_generation(0)):
        pair.journal.failing = set(SLEEP)
        with pytest.raises(RuntimeError, match="sleep weights kv_cache failed"):
            pair.hybrid.enter_training()
        assert pair.hybrid.state is State.TRAINING
        learn(pair, batch)
        enter()
        assert pair.journal.take()[:1] == SLEEP
        pair.hybrid.enter_generation(0)
        assert current(pair)


def test_a_sleep_that_fails_after_an_error_hides_it_not(pair: rig.Pair, caplog: pytest.LogCaptureFixture) -> None:
    pair.hybrid.enter_training()
    pair.journal.take()
    pair.journal.failing = {"load", "sleep weights"}
    with pytest.raises(RuntimeError, match="load failed"):
        pair.hybrid.enter_generation(0)
    assert "sleep weights failed" in caplog.text
    pair.journal.take()
    pair.hybrid.enter_generation(0)
    assert pair.journal.take() == ["sleep weights", *SYNC] and current(pair)


def test_all_is_compared_after_a_sync_that_failed(pair: rig.Pair) -> None:
    pair.hybrid.enter_generation(0)
    assert pair.hybrid._synced
    pair.journal.failing = {"load"}
    with pytest.raises(RuntimeError, match="load failed"):
        pair.hybrid.enter_generation(1)
    assert not pair.hybrid._synced


def test_engines_that_neither_sleep_nor_offload_are_left_alone(models: dict[str, Path]) -> None:
    journal = rig.Journal()
    pair = rig.Pair(models["untied"], journal=journal, sharing="never")
    with pair.hybrid.generation(0) as metrics:
        assert journal.take() == ["load", "gather"] and "wake_s" not in metrics
    with pair.hybrid.generation(0) as metrics:
        assert metrics == {}
    assert journal.take() == []
