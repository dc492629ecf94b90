"""Where among a rank's tokens the wanted log-probabilities are computed."""

from __future__ import annotations

import torch
from torch import Tensor

from drivetrain import RunError
from drivetrain_backend_common import rows
from drivetrain_backend_megatron.packing import PackedParams


class Sequences(rows.Sequences):
    """Packed rows, that ranks of context parallelism share."""

    def predictors(self, packed: PackedParams, *, cp: int, rank: int) -> tuple[Tensor, Tensor]:
        """Which of the wanted tokens a rank of context parallelism predicts, and the places of their predictors among
        its own tokens: ``(own,)`` each, on the host.
        """
        place = rows.starts(packed.lengths)[self.sequence] + self.offset
        if packed.order is None:
            return torch.arange(len(place)), place
        size, place = sum(packed.lengths) // cp, packed.order.cpu()[place]
        own = (place // size == rank).nonzero()[:, 0]
        return own, place[own] % size


def last_tokens(input_ids: Tensor, attention_mask: Tensor, *, pad: int | None, vocab_size: int) -> rows.Tokens:
    """Texts to be read up to the last token that is none of padding, as transformers' sequence classifiers judge them.

    Args:
        input_ids, attention_mask: ``(rows, tokens)``, right padded with anything.
        pad: the token of padding in the model's config; texts may end with it all the same.

    Raises:
        drivetrain.UserError: for a token that the model does not know.
        drivetrain.RunError: for a row without a token.
    """
    ids, real = input_ids.cpu(), attention_mask.cpu() != 0
    if not bool(real.any(dim=1).all()):
        raise RunError("a text has no token", where="batch")
    place = torch.arange(ids.shape[1] + 1)
    last = torch.where(real & (ids != pad), place[:-1], 0).amax(dim=1) if pad is not None else real.sum(dim=1) - 1
    # what follows it stands for a token that it predicts
    ids = torch.where(place <= last[:, None], torch.nn.functional.pad(ids, (0, 1)), 0)
    return rows.Tokens.of(ids, place <= last[:, None] + 1, place == last[:, None] + 1, vocab_size=vocab_size,
                     where="reward_model.model.tokenizer")  # fmt: skip
