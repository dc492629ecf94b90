"""Where among a rank's tokens the wanted log-probabilities are computed."""

from __future__ import annotations

import torch
from torch import Tensor

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
