"""The trackers ``jsonl`` and ``lines``."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from drivetrain.builtin.trackers import JSONLTracker, LinesTracker
from drivetrain.config import PluginConfig
from drivetrain.contracts.tracker import RunInfo, RunResult


def info(run_dir: Path, first_step: int = 1) -> RunInfo:
    config: Any = SimpleNamespace(trainer=SimpleNamespace(steps=20))
    return RunInfo(run_dir=run_dir, config=config, notes=("detected cpu",), first_step=first_step,
                   plan={"prompts": 4, "samples": 2})  # fmt: skip


def jsonl(run_dir: Path, first_step: int = 1) -> JSONLTracker:
    tracker = JSONLTracker(PluginConfig(name="jsonl"))
    tracker.started(info(run_dir, first_step))
    return tracker


def rows(path: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().split("\n") if line]


def test_numbers_that_are_none_become_null(tmp_path: Path) -> None:
    jsonl(tmp_path).metrics(1, {"a": 0.5, "b": math.nan, "c": math.inf, "d": 3})
    assert rows(tmp_path / "metrics.jsonl") == [{"step": 1, "a": 0.5, "b": None, "c": None, "d": 3}]


def test_a_resumed_run_drops_the_lines_of_steps_to_come(tmp_path: Path) -> None:
    tracker = jsonl(tmp_path)
    for step in range(5):
        tracker.metrics(step, {"course": 1.0})
        tracker.samples(step, [{"prompt": "a"}, {"prompt": "b"}])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "cut')
    tracker = jsonl(tmp_path, first_step=3)
    tracker.metrics(3, {"course": 2.0})
    assert [(row["step"], row["course"]) for row in rows(tmp_path / "metrics.jsonl")] == [
        (0, 1.0), (1, 1.0), (2, 1.0), (3, 2.0)
    ]  # fmt: skip
    assert [row["step"] for row in rows(tmp_path / "samples.jsonl")] == [0, 0, 1, 1, 2, 2]


def test_a_run_that_starts_over_drops_step_0_as_well(tmp_path: Path) -> None:
    for course in (1.0, 2.0):
        jsonl(tmp_path).metrics(0, {"course": course})
    assert rows(tmp_path / "metrics.jsonl") == [{"step": 0, "course": 2.0}]


@pytest.mark.parametrize("text", ["\u2028", "\x85", "\r", "\x1c", "a\nb", "\ud83d\ude00", "ü"])
def test_any_text_survives_resuming(tmp_path: Path, text: str) -> None:
    text = text.encode("utf-16", "surrogatepass").decode("utf-16")
    jsonl(tmp_path).samples(1, [{"response": text}])
    jsonl(tmp_path, first_step=2).samples(2, [{"response": text}])
    assert rows(tmp_path / "samples.jsonl") == [{"step": 1, "response": text}, {"step": 2, "response": text}]


def test_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tracker = LinesTracker(PluginConfig(name="lines"))
    tracker.started(info(tmp_path))
    tracker.metrics(7, {"train/reward": 0.25, "throughput/tokens_per_s": 12345.6, "other": 1.0, "eval/accuracy": 0.5})
    tracker.ended(RunResult(status="finished", steps_done=20, steps_planned=20, run_dir=tmp_path, last_metrics={}))
    assert capsys.readouterr().out.splitlines() == [
        "detected cpu", "prompts 4  samples 2", "step 7/20  reward 0.250  accuracy 0.500  tok/s 12,346",
        f"finished: 20 of 20 steps, {tmp_path}",
    ]  # fmt: skip
