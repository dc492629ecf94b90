"""Items in parts of nearly equal weight."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.builtin.balance import karmarkar_karp

WEIGHTS = st.lists(st.integers(0, 50), max_size=24)


@pytest.mark.parametrize("weights, parts, equal, expected", [
    ([8, 7, 6, 5, 4], 2, False, [[0, 2], [1, 3, 4]]),  # 14 and 16: a heuristic, for 15 and 15 can be had
    ([8, 7, 6, 5, 4], 2, True, [[0, 2], [1, 3, 4]]),
    ([9, 1, 1, 1], 2, False, [[0], [1, 2, 3]]),
    ([9, 1, 1, 1], 2, True, [[0, 3], [1, 2]]),
    ([5, 5, 5], 3, True, [[0], [1], [2]]),
    ([5], 3, False, [[0], [], []]),
    ([], 2, True, [[], []]),
    ([3, 2, 1], 1, True, [[0, 1, 2]]),
])  # fmt: skip
def test_examples(weights, parts, equal, expected) -> None:
    assert karmarkar_karp(weights, parts, equal=equal) == expected


@settings(max_examples=60, deadline=None)
@given(WEIGHTS, st.integers(1, 6), st.booleans())
def test_every_item_is_in_one_part_and_none_is_too_heavy(weights, parts, equal) -> None:
    found = karmarkar_karp(weights, parts, equal=equal)
    assert sorted(item for part in found for item in part) == list(range(len(weights))) and len(found) == parts
    assert all(part == sorted(part) for part in found)
    assert found == sorted(found, key=lambda part: part[0] if part else len(weights))
    sums = [sum(weights[item] for item in part) for part in found]
    if equal:
        assert max(map(len, found)) <= math.ceil(len(weights) / parts)
    assert max(sums) - min(sums) <= max(weights, default=0)


def test_parts_are_closer_than_those_of_consecutive_rows() -> None:
    weights = [(37 * number) % 101 + number for number in range(64)]
    for equal in (False, True):
        sums = [sum(weights[item] for item in part) for part in karmarkar_karp(weights, 8, equal=equal)]
        consecutive = [sum(weights[start : start + 8]) for start in range(0, 64, 8)]
        assert max(sums) - min(sums) < 0.05 * (max(consecutive) - min(consecutive))
