"""The table of standard columns and the check against it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from drivetrain.protocol import STANDARD_COLUMNS, DataProto, check_columns, columns_markdown


def test_the_table_is_whole():
    assert all(name == column.name and column.meaning for name, column in STANDARD_COLUMNS.items())
    assert all(column.shape.startswith("(batch,") for column in STANDARD_COLUMNS.values())
    table = columns_markdown().splitlines()
    assert len(table) == len(STANDARD_COLUMNS) + 2
    assert table[2] == "| `prompts` | `(batch, prompt)` | int64 | prompt tokens, left padded |"


def good_batch() -> DataProto:
    return DataProto.from_single_dict(
        {
            "responses": torch.zeros(2, 3).long(),
            "response_mask": torch.ones(2, 3).bool(),
            "values": torch.zeros(2, 3).bfloat16(),
            "uid": ["a", "b"],
            "loss_group": np.arange(2),
            "own": torch.zeros(2, 9),
        }
    )


def test_a_good_batch_passes():
    check_columns(good_batch(), good_batch().keys())


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({}, "there is no returns among"),
        ({"returns": torch.zeros(2, 4)}, "returns has response size 4, responses has 3"),
        ({"returns": torch.zeros(2)}, r"returns has shape \(2,\); it must be \(batch, response\)"),
        ({"returns": torch.zeros(2, 3).long()}, "returns is torch.int64; it must be floating"),
        ({"returns": np.empty((2, 3), object)}, "returns is object; it must be floating"),
    ],
)
def test_what_does_not_fit_is_named(columns, message):
    with pytest.raises(ValueError, match=message):
        check_columns(good_batch().with_columns(**columns), ["responses", "returns"])


def test_all_problems_are_listed():
    with pytest.raises(ValueError, match=r"no prompts among .*; uid is torch.float32; it must be integer, or objects"):
        check_columns(DataProto({"uid": torch.zeros(2)}), ["prompts", "uid"])
