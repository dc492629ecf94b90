"""Rows added so that a batch divides, and their removal. Padding never reaches a loss.

Added rows repeat the first ones, because a model must be able to run on them. They are marked by a
column and not by a number in `meta_info`: the mark follows its rows through chunk, reorder and
concat, where a number would be true of the whole batch only. `response_mask`, which every loss and
metric of tokens goes by, is zero there; what counts rows, or groups them, leaves marked rows out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from drivetrain.protocol.dataproto import DataProto

PADDING_COLUMN = "is_padding"
"""Boolean column `(batch,)`, there only in a padded batch: True in the rows that padding added."""


def pad_to_multiple(proto: DataProto, multiple: int) -> tuple[DataProto, int]:
    """A padded copy and the number of rows added; see `DataProto.pad_to_multiple`."""
    if multiple < 1:
        raise ValueError(f"cannot pad to a multiple of {multiple}")
    rows = len(proto)
    added = -rows % multiple
    if added == 0:
        return proto[:], 0
    if PADDING_COLUMN in proto:
        raise ValueError("this batch is padded already; unpad it first")
    padded = proto[torch.arange(rows + added) % rows]
    padded.batch[PADDING_COLUMN] = torch.arange(rows + added) >= rows
    if "response_mask" in padded.batch:
        mask = padded.batch["response_mask"]
        padded.batch["response_mask"] = torch.cat([mask[:rows], torch.zeros_like(mask[rows:])])
    return padded, added


def unpad(proto: DataProto, pad_size: int) -> DataProto:
    """Without the last `pad_size` rows and the mark; see `DataProto.unpad`."""
    rows = len(proto)
    if not 0 <= pad_size <= rows:
        raise ValueError(f"cannot remove {pad_size} of {rows} rows")
    kept = proto[: rows - pad_size]
    if PADDING_COLUMN in proto.batch:
        mark = proto.batch[PADDING_COLUMN].cpu()
        if not torch.equal(mark, torch.arange(rows) >= rows - pad_size):
            raise ValueError(f"the last {pad_size} rows are not the {int(mark.sum())} padded ones")
        kept.pop([PADDING_COLUMN])
    return kept
