"""The tracker ``tensorboard``, read back with TensorBoard's own reader."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from drivetrain import RunResult
from drivetrain_trackers.configs import TensorBoardConfig
from drivetrain_trackers.tensorboard_events import TensorBoardTracker

Tell = Callable[..., None]


def read(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0}).Reload()


def texts(events: EventAccumulator, tag: str) -> dict[int, str]:
    return {event.step: event.tensor_proto.string_val[0].decode() for event in events.Tensors(f"{tag}/text_summary")}


def scalars(events: EventAccumulator, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in events.Scalars(tag)]


def tracker(**options: Any) -> TensorBoardTracker:
    return TensorBoardTracker(TensorBoardConfig(name="tensorboard", **options))


def test_events(tmp_path: Path, tell: Tell, result: Callable[..., RunResult]) -> None:
    made = tracker()
    tell(made, tmp_path, range(3))
    made.ended(result("failed", "no memory"))
    events = read(tmp_path / "tensorboard")
    assert scalars(events, "train/reward") == [(1, 1.0), (2, 2.0)]
    assert scalars(events, "eval/accuracy") == [(0, 0.25), (2, 0.5)]
    assert all(math.isnan(value) for _, value in scalars(events, "train/kl"))
    assert scalars(events, "train/grad_norm") == [(1, math.inf), (2, math.inf)]
    shown = texts(events, "eval/samples")
    assert shown.keys() == {0, 2}
    assert shown[2].splitlines() == [
        "| prompt | response | answer | score | correct | data_source |", "| --- | --- | --- | --- | --- | --- |",
        "| 3\\|4= | 4<br>ü | 4 | 1.0 | True | max |", '| 1,2= | ? | {"value": [2]} | nan |  |  |',
    ]  # fmt: skip
    assert "| rewards.0.name | exact_match |" in texts(events, "config")[0]
    assert texts(events, "status") == {3: "failed: no memory"}


def test_events_of_steps_to_come_are_purged(tmp_path: Path, tell: Tell, result: Callable[..., RunResult]) -> None:
    folder = tmp_path / "elsewhere"
    for steps, first_step, course in ((range(5), 1, 1.0), (range(3, 6), 3, 10.0)):
        made = tracker(dir=folder, samples=0)
        tell(made, tmp_path, steps, first_step=first_step, course=course)
        made.ended(result())
    events = read(folder)
    assert scalars(events, "train/reward") == [(1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0), (5, 50.0)]
    assert "eval/samples/text_summary" not in events.Tags()["tensors"]
    assert not (tmp_path / "tensorboard").exists()

    made = tracker(dir=folder)
    tell(made, tmp_path, range(2), course=7.0)
    made.ended(result())
    assert scalars(read(folder), "train/reward") == [(1, 7.0)]
