"""Typed metrics merge exactly, lazily and only with their own kind."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch

from drivetrain.metrics import Max, Mean, Metric, Min, Sum, merge_metrics, to_floats

PARTS: list[dict[str, Metric]] = [
    {"loss": Sum(1.5), "kl": Mean(3.0, 2), "top": Max(1.0), "low": Min(-1.0)},
    {"loss": Sum(2.0), "kl": Mean(3.0, 10), "top": Max(4.0), "low": Min(7.0), "late": Sum(1)},
    {"kl": Mean(0.0, 0), "top": Max(2.0)},
]
MERGED = {"loss": 3.5, "kl": 0.5, "top": 4.0, "low": -1.0, "late": 1.0}


def as_tensors(metric: Metric) -> Metric:
    return type(metric)(*(torch.tensor(float(value)) for value in vars(metric).values()))


@pytest.mark.parametrize("lazy", [(), (0,), (1,), (2,), (0, 1, 2)])
def test_merge(lazy: tuple[int, ...]) -> None:
    parts = [
        {name: as_tensors(metric) if i in lazy else metric for name, metric in part.items()}
        for i, part in enumerate(PARTS)
    ]
    assert to_floats(merge_metrics(parts)) == MERGED
    assert to_floats(merge_metrics(reversed(parts))) == MERGED


def test_merge_changes_no_part() -> None:
    merge_metrics(PARTS)
    assert PARTS[0]["loss"] == Sum(1.5)
    assert merge_metrics([]) == {}


def test_mixed_types_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match="'kl': cannot merge Mean with Sum"):
        merge_metrics([{"kl": Mean(1.0, 1)}, {"kl": Sum(1.0)}])


def test_tensors_stay_lazy_and_detached() -> None:
    value = torch.tensor(2.0, requires_grad=True) * 3
    merged = Max(value).merge(Max(1.0))
    assert isinstance(merged.value, torch.Tensor) and not merged.value.requires_grad
    settled = Mean(value, 4).settle()
    assert settled == Mean(6.0, 4.0) and type(settled.total) is float


@pytest.mark.parametrize("make", [float, torch.tensor])
@pytest.mark.parametrize("kind", [Max, Min])
def test_nan_is_noticed(kind: type[Max] | type[Min], make: type[float]) -> None:
    for first, second in [(1.0, math.nan), (math.nan, 1.0)]:
        assert math.isnan(kind(make(first)).merge(kind(make(second))).result())


def test_mean_of_nothing() -> None:
    assert Mean(0.0, 0).result() == 0.0


def test_needs_no_torch() -> None:
    program = "import sys; sys.modules['torch'] = None; import drivetrain.metrics"
    subprocess.run([sys.executable, "-c", program], check=True)
