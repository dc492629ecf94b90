"""Phases are timed, and devices change sides only when they must."""

from __future__ import annotations

import time

import pytest

from drivetrain.driver.phases import Phases


@pytest.fixture
def sides() -> list[str]:
    return []


@pytest.fixture
def phases(sides: list[str]) -> Phases:
    def switch(side: str) -> dict[str, float]:
        sides.append(side)
        return {"bytes": float(len(sides))}

    return Phases(lambda _: None, switch)


def enter(phases: Phases, *names: str) -> None:
    for name in names:
        with phases(name, side={"g": "generation", "t": "training"}.get(name)):
            pass


@pytest.mark.parametrize(
    "names, switches",
    [
        ("t", []),
        ("gg", ["generation"]),
        ("gtt", ["generation", "training"]),
        ("grgt", ["generation", "training"]),  # scoring needs neither side
        ("gtg", ["generation", "training", "generation"]),
    ],
)
def test_a_switch_happens_only_when_the_side_changes(
    phases: Phases, sides: list[str], names: str, switches: list[str]
) -> None:
    enter(phases, *names)
    assert sides == switches


def test_new_weights_are_fetched_even_without_a_change_of_sides(phases: Phases, sides: list[str]) -> None:
    enter(phases, "g")
    phases.weights_changed()
    enter(phases, "g")
    assert sides == ["generation", "generation"]


def test_seconds_add_up_per_phase_and_are_taken_once(phases: Phases) -> None:
    for _ in range(2):
        with phases("reward"):
            time.sleep(0.02)
    with pytest.raises(ValueError), phases("g", side="generation"):
        raise ValueError
    taken = phases.take()
    assert 0.04 <= taken.pop("time/reward_s") < 5 and taken.pop("sync/bytes") == 1.0
    assert taken.keys() == {"time/g_s", "time/sync_s"}
    assert phases.take() == {}


def test_phases_are_announced_before_they_start() -> None:
    said: list[str] = []
    phases = Phases(said.append, lambda side: {})
    with phases("evaluate", side="generation"):
        assert said == ["evaluate"]


def test_ranks_that_have_answered_are_told_with_the_phase_under_way() -> None:
    said: list[tuple[str, int, int]] = []
    phases = Phases(lambda _: None, lambda side: phases.answered(1, 2) or {}, ranks=lambda *told: said.append(told))
    with phases("generate", side="generation"):
        phases.answered(3, 8)
        phases.answered(1, 1)  # of one there is nothing to tell
    phases.answered(3, 8)  # nor outside a phase
    assert said == [("sync", 1, 2), ("generate", 3, 8)]


def test_a_switch_that_fails_is_tried_again() -> None:
    tried: list[str] = []

    def switch(side: str) -> dict[str, float]:
        tried.append(side)
        if len(tried) == 1:
            raise RuntimeError("out of memory")
        return {}

    phases = Phases(lambda _: None, switch)
    with pytest.raises(RuntimeError):
        enter(phases, "g")
    enter(phases, "g", "g")
    assert tried == ["generation", "generation"]
