"""The contract of an algorithm: two short programs on the driver."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from drivetrain.errors import UserError

if TYPE_CHECKING:
    from drivetrain.config import AlgorithmConfig
    from drivetrain.driver.roles import Roles
    from drivetrain.metrics import Metric
    from drivetrain.protocol import DataProto


@dataclass(frozen=True)
class LossTerm:
    """One term of an objective, which is the sum of ``weight * term``; by name, so that it crosses to a worker."""

    name: str  # offered by the hook policy_losses
    weight: float = 1.0  # a term of weight 0 is not computed
    args: Mapping[str, Any] = field(default_factory=dict)  # keyword arguments of the loss function


class Algorithm(ABC):
    """What distinguishes one training algorithm from another, written as its paper's box.

    The driver calls :meth:`collect` and :meth:`learn` once a step. Weight sync, sleep and wake, offload, evaluation
    and checkpoints are the driver's; an algorithm never asks for them, so it runs unchanged on any placement.
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        self.config = config

    def notes(self, roles: Roles) -> Sequence[str]:
        """What the user is told when the run starts: what settings come to on these roles, where it may surprise."""
        return ()

    @abstractmethod
    def collect(self, roles: Roles, prompts: DataProto) -> DataProto:
        """Turn prompts into a batch to learn from: generate, score, log-probs, values, advantages.

        Args:
            roles: the models and the rewards (``roles.rollout``, ``roles.actor``, ``roles.ref``, ``roles.critic``,
                ``roles.rewards``).
            prompts: one row a prompt, with the columns ``input_ids``, ``attention_mask`` (left padded) and ``uid``.

        Returns:
            the batch, with ``response_mask`` and whatever :meth:`learn` needs.
        """

    @abstractmethod
    def learn(self, roles: Roles, batch: DataProto) -> dict[str, Metric]:
        """Update the models from the batch and return metrics, named without a prefix."""

    def loss_terms(self, role: str) -> Sequence[LossTerm]:
        """The objective of ``actor`` or ``critic``, for workers that are told to update without being given terms.

        Raises:
            drivetrain.UserError: the algorithm does not say; give the terms with the call.
        """
        raise UserError(f"algorithm {self.config.name!r} names no loss terms for {role}",
                        mend=f"give terms to update_{role}, or define {type(self).__name__}.loss_terms")  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """All that must survive a restart, by default nothing: plain JSON values and, at the top level, batches.

        A :class:`DataProto` goes into a folder of the checkpoint, called like its key.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what :meth:`state_dict` returned."""
        if state:
            raise ValueError(f"{type(self).__name__} keeps no state, but the checkpoint holds {sorted(state)}")
