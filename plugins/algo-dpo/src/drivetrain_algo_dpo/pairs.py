"""Pairs of a better and a worse response to a prompt, as rows of a batch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from drivetrain import DataProto


def as_pairs(batch: DataProto) -> DataProto:
    """Mark rows ``2k`` and ``2k + 1``, which share a ``uid``, as the better and the worse response to a prompt.

    Returns:
        the batch with ``preference`` (rows,), 1 and -1 in turn, and ``loss_group`` (rows,), by which no part of
        drivetrain separates the two. Raises ValueError where the two are of different prompts.
    """
    uid = batch["uid"]
    if uid[0::2].tolist() != uid[1::2].tolist():
        raise ValueError("rows 2k and 2k + 1 have to be responses to one prompt")
    return batch.with_columns(preference=torch.tensor([1.0, -1.0]).repeat(len(batch) // 2), loss_group=uid)


def join_pairs(better: DataProto, worse: DataProto) -> DataProto:
    """One batch of pairs from two batches of responses to the same prompts in the same order.

    It has their prompts and responses, the narrower padded on the right, and of the other columns the non-tensor ones
    that both have. Tokens stay as they are. Raises ValueError where the prompts are not the same.
    """
    if not torch.equal(better["prompts"], worse["prompts"]):
        raise ValueError("the two batches have to be made from the same batch of prompts")
    texts = [name for name in better.non_tensor_batch if name in worse.non_tensor_batch]
    width = max(batch["responses"].shape[1] for batch in (better, worse))
    parts = [_responses(batch, width).select(non_tensor_batch_keys=texts) for batch in (better, worse)]
    rows = torch.arange(2 * len(better)).view(2, -1).T.flatten()
    return as_pairs(DataProto.concat(parts)[rows])


def best_and_worst(batch: DataProto, samples: int) -> Tensor:
    """Rows of the best and the worst sample of each prompt by ``scores``, in turn (2 x prompts,); of equals the first.

    Args:
        samples: of each prompt, whose rows are together.
    """
    scores = batch["scores"].view(-1, samples)
    first = samples * torch.arange(len(scores))
    return torch.stack([first + scores.argmax(dim=1), first + scores.argmin(dim=1)], dim=1).flatten()


def scored_pairs(batch: DataProto, samples: int) -> DataProto:
    """The best and the worst sample of each prompt as pairs.

    Prompts whose samples all score alike keep their place with an empty ``response_mask``: nothing is learnt from
    them and no mean counts them, while mini-batches stay whole numbers of prompts.
    """
    pairs = as_pairs(batch[best_and_worst(batch, samples)])
    differ = pairs["scores"][0::2] > pairs["scores"][1::2]
    return pairs.with_columns(response_mask=pairs["response_mask"] * differ.repeat_interleave(2)[:, None])


def _responses(batch: DataProto, width: int) -> DataProto:
    """Prompts and responses alone, with masked positions on the right up to that width of the responses."""
    more = (0, width - batch["responses"].shape[1])
    padded = {name: pad(batch[name], more) for name in ("responses", "response_mask", "input_ids", "attention_mask")}
    return DataProto({"prompts": batch["prompts"], **padded}, batch.non_tensor_batch)
