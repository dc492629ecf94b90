"""The contracts of the two kinds of pure function that an algorithm is composed of.

Both get columns ``(rows, response)`` by name and, as ``options``, the keyword arguments that their specs announce.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from drivetrain.numerics import Counts, LossInputs, LossResult


class LossFunction(Protocol):
    """One term of an objective, called once for each micro-batch.

    It returns the micro-batch's share of the term, already divided by the global counts, so that the term of the
    mini-batch is the plain sum of the shares over micro-batches and ranks.
    """

    def __call__(
        self, outputs: LossInputs, batch: Mapping[str, Tensor], counts: Counts, /, **options: Any
    ) -> LossResult:
        """Compute the share.

        Args:
            outputs: what the model says now: ``log_probs``, ``entropy``, ``values``, each ``(rows, response)``.
            batch: columns such as ``response_mask``, ``advantages``, ``old_log_probs``.
            counts: tokens, sequences and groups of the whole mini-batch over all ranks.
        """


class AdvantageEstimator(Protocol):
    """An estimate of how much better each action was than expected."""

    def __call__(self, batch: Mapping[str, Tensor], group: Tensor, /, **options: Any) -> Tensor | tuple[Tensor, Tensor]:
        """Compute advantages, or advantages and returns, each ``(rows, response)`` and zero where the mask is zero.

        Args:
            batch: columns such as ``token_level_rewards``, ``response_mask``, ``values``.
            group: ``(rows,)`` integers; rows of one prompt share a number.
        """
