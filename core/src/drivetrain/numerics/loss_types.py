"""What goes into a loss term and what comes out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from drivetrain.metrics import Metric


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """What a model computed for one micro-batch, with gradients; each (rows, response), float32 or wider."""

    log_probs: Tensor | None = None
    """log-prob of each response token, in nats"""
    entropy: Tensor | None = None
    """entropy of the distribution that each response token was drawn from, in nats"""
    values: Tensor | None = None
    """the critic's value before each response token"""

    def require(self, name: Literal["log_probs", "entropy", "values"]) -> Tensor:
        """The named tensor; ValueError if the model did not compute it."""
        tensor: Tensor | None = getattr(self, name)
        if tensor is None:
            raise ValueError(f"this loss term needs {name}, which the model did not compute")
        return tensor


@dataclass(frozen=True, kw_only=True)
class LossResult:
    """A term's share for one micro-batch."""

    loss: Tensor
    """scalar, already divided by the global counts"""
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """merge over micro-batches and ranks"""
