from __future__ import annotations

import math

import pytest

from drivetrain_report.numbers import duration, number, seconds
from drivetrain_report.scale import moving_mean, spread, step_axis, thin, tick_labels, value_axis


@pytest.mark.parametrize(("value", "text"), [
    (0.0, "0"), (0.4123, "0.412"), (-0.4123, "-0.412"), (4.807, "4.81"), (43.21, "43.2"), (1234.4, "1,234"),
    (0.0123, "0.0123"), (3e-4, "3.0e-4"), (0.99996, "1.00"), (math.nan, "nan"), (math.inf, "inf"),
])  # fmt: skip
def test_numbers_are_rounded(value, text):
    assert number(value) == text


def test_times():
    assert [seconds(v) for v in (0.5234, 12.34, 432.1)] == ["0.52 s", "12.3 s", "432 s"]
    assert [duration(v) for v in (59.4, 59.6, 156)] == ["59 s", "1 min 00 s", "2 min 36 s"]
    assert [duration(v) for v in (3599.6, 3840)] == ["1 h 00 min", "1 h 04 min"]


@pytest.mark.parametrize("values", [[0.0], [5.0, 5.0], [-3.0, 7.0], [1e-9, 2e-9], [1e9, 3e9], [math.nan], [0.3, 0.31]])
def test_an_axis_holds_its_values(values):
    axis = value_axis(values)
    assert len(axis.ticks) >= 2
    assert all(axis.low - 1e-12 <= t <= axis.high * (1 + 1e-9) + 1e-12 for t in axis.ticks)
    assert all(axis.low <= v <= axis.high for v in values if math.isfinite(v))
    assert len(set(tick_labels(axis.ticks))) == len(axis.ticks)


def test_a_spike_is_left_outside():
    axis = value_axis([1.0 + i % 3 for i in range(100)] + [1e6])
    assert axis.high < 100


def test_steps_have_whole_ticks():
    assert step_axis(0, 3).ticks == (0, 1, 2, 3)
    assert step_axis(0, 300).ticks == (0, 100, 200, 300)
    assert step_axis(0, 0).ticks == (0, 1)


def test_labels_move_apart():
    assert spread([0.5, 0.5, 0.52], 0.1) == pytest.approx([0.5, 0.6, 0.7])
    assert spread([0.95, 0.99, 1.0], 0.1) == pytest.approx([0.8, 0.9, 1.0])


def test_moving_mean_skips_what_is_not_finite():
    assert moving_mean([1.0, math.nan, 3.0], 3) == [1.0, 2.0, 3.0]


def test_thinning_keeps_the_ends():
    kept = thin(1001, 100)
    assert (kept[0], kept[-1]) == (0, 1000)
    assert len(kept) <= 102
    assert thin(0, 10) == []
