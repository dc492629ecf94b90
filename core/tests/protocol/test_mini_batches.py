"""Mini-batches of whole prompts, and rows by uid."""

from __future__ import annotations

import pytest
import torch

from drivetrain.protocol import DataProto, units


def prompts_of(uids, loss_group=None) -> DataProto:
    columns = {"row": torch.arange(len(uids)), "uid": list(uids)}
    return DataProto.from_single_dict(columns if loss_group is None else {**columns, "loss_group": loss_group})


def rows_of(batches):
    return [part["row"].tolist() for part in batches]


def test_in_order_without_a_seed_and_without_copying():
    batch = prompts_of("aabbccdd")
    parts = list(batch.mini_batches(2))
    assert rows_of(parts) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert parts[1]["row"].untyped_storage().data_ptr() == batch["row"].untyped_storage().data_ptr()


def test_scattered_rows_of_a_prompt_come_together():
    assert rows_of(prompts_of("abcdabcd").mini_batches(1)) == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_a_seed_shuffles():
    batch = prompts_of("abcdefghijkl")
    seeded = rows_of(batch.mini_batches(3, seed=5))
    assert seeded == rows_of(batch.mini_batches(3, seed=5))
    assert seeded != rows_of(batch.mini_batches(3)) and seeded != rows_of(batch.mini_batches(3, seed=6))


def test_the_error_says_the_arithmetic_at_once():
    with pytest.raises(ValueError, match=r"5 prompts .10 rows. do not divide into mini-batches of 2"):
        prompts_of("aabbccddee").mini_batches(2)
    with pytest.raises(ValueError, match="mini-batches of 0"):
        prompts_of("ab").mini_batches(0)
    with pytest.raises(KeyError, match="uid"):
        DataProto({"row": torch.arange(3)}).mini_batches(1)


def test_a_loss_group_over_prompts_holds_them_together():
    batch = prompts_of("abcd", loss_group=torch.tensor([0, 1, 2, 0]))
    assert rows_of(batch.mini_batches(2)) == [[0, 3], [1, 2]]
    assert rows_of(prompts_of("abc", loss_group=[None, None, None]).mini_batches(1)) == [[0], [1], [2]]
    with pytest.raises(ValueError, match=r"ties 2 prompts together.*mini-batches of 1"):
        batch.mini_batches(1)


def test_single_prompts_fill_what_tied_ones_leave():
    batch = prompts_of("abcdef", loss_group=[None, None, "x", "x", "y", "y"])
    assert rows_of(batch.mini_batches(3)) == [[2, 3, 0], [4, 5, 1]]


def test_select_uids():
    batch = prompts_of("abcab")
    assert batch.select_uids(["b", "a"])["row"].tolist() == [0, 1, 3, 4]
    assert len(batch.select_uids([])) == 0
    with pytest.raises(KeyError, match=r"no rows of uid .*'z'"):
        batch.select_uids(["a", "z"])


def test_units_are_connected_rows() -> None:
    assert units(6, [["a", "b", "a", None, None, "c"], [1, 2, 3, 3, 4, 2]]) == [[0, 2, 3], [1, 5], [4]]
    assert units(2, []) == [[0], [1]] and units(0, [[]]) == []
