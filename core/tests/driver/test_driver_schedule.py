"""The course of the learning rate."""

from __future__ import annotations

import pytest

from drivetrain.config import ScheduleConfig
from drivetrain.driver.schedule import lr_factor


@pytest.mark.parametrize(
    "options, factors",
    [
        ({}, [1, 1, 1, 1, 1, 1]),
        ({"warmup_steps": 4}, [0.25, 0.5, 0.75, 1, 1, 1]),
        ({"name": "linear"}, [5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0]),
        ({"name": "linear", "warmup_steps": 2, "min_factor": 0.2}, [0.5, 1, 0.8, 0.6, 0.4, 0.2]),
        # (1 + cos(pi x)) / 2 at x = 1/4, 1/2, 3/4, 1
        ({"name": "cosine", "warmup_steps": 2}, [0.5, 1, 0.8535533905932737, 0.5, 0.14644660940672627, 0]),
        ({"name": "cosine", "warmup_steps": 2, "min_factor": 0.5}, [0.5, 1, 0.9267766952966369, 0.75,
                                                                     0.5732233047033631, 0.5]),
        ({"name": "linear", "warmup_steps": 9}, [1 / 9, 2 / 9, 3 / 9, 4 / 9, 5 / 9, 6 / 9]),
    ],
)  # fmt: skip
def test_factor_of_each_of_six_steps(options: dict, factors: list[float]) -> None:
    schedule = ScheduleConfig(**options)
    assert [lr_factor(schedule, step, 6) for step in range(1, 7)] == pytest.approx(factors, abs=1e-12)
