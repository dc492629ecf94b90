"""The contracts of the two kinds of pure function that an algorithm is composed of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from drivetrain.numerics import Counts, LossInputs, LossResult


class LossFunction(Protocol):
    """One term of an objective over some rows of a mini-batch.

    It is called once for each micro-batch and returns its share of the term, already divided by the global counts,
    so that the term of the mini-batch is the plain sum of the shares over micro-batches and ranks.
    """

    def __call__(
        self, outputs: LossInputs, batch: Mapping[str, Tensor], counts: Counts, /, **options: Any
    ) -> LossResult:
        """Compute the share.

        Args:
            outputs: what the model says now: ``log_probs``, ``entropy``, ``values``, each ``(rows, response)``.
            batch: the columns of the rows, such as ``response_mask``, ``advantages``, ``old_log_probs``.
            counts: tokens, sequences and groups of the whole mini-batch over all ranks.
            options: the keyword arguments named in the spec's ``options``.
        """


class AdvantageEstimator(Protocol):
    """An estimate of how much better each action was than expected."""

    def __call__(self, batch: Mapping[str, Tensor], group: Tensor, /, **options: Any) -> Tensor | tuple[Tensor, Tensor]:
        """Compute advantages, or advantages and returns, each ``(rows, response)`` and zero where the mask is zero.

        Args:
            batch: columns such as ``token_level_rewards``, ``response_mask``, ``values``, each ``(rows, response)``.
            group: ``(rows,)`` integers; rows of one prompt share a number.
            options: the keyword arguments named in the spec's ``options``.
        """
