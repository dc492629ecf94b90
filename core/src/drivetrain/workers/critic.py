"""The worker of the critic, on any training engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from drivetrain.protocol import DataProto
from drivetrain.workers.model_worker import LEARNING, ModelWorker
from drivetrain.workers.registration import register

if TYPE_CHECKING:
    from drivetrain.config import RunConfig
    from drivetrain.contracts.algorithm import LossTerm
    from drivetrain.metrics import Metric
    from drivetrain.numerics import Counts


class CriticWorker(ModelWorker):
    """Plays ``critic``: estimates values, and learns to estimate them."""

    learns = "critic"

    def __init__(self, config: RunConfig, role: str = "critic", **place: Any) -> None:
        super().__init__(config, role, **place)

    @register()
    def init_model(self) -> str:
        """Load the model. Returns the name of the device."""
        critic = self.config.critic
        assert critic is not None
        self.start_backend("critic", critic.backend, critic.model or self.config.model, critic.optimizer,
                           critic.max_grad_norm)  # fmt: skip
        return self.device_name

    @register("dp_compute_proto")
    def compute_values(self, batch: DataProto) -> DataProto:
        """The critic's ``values`` before each response token (rows, response)."""
        with self.phase("values", "critic", "parameters"):
            return self.finite(**self.backends["critic"].forward(batch, ("values",), temperature=1.0))

    @register("dp_compute_metric")
    def update_critic(
        self, batch: DataProto, terms: Sequence[LossTerm] | None = None, counts: Counts | None = None,
        lr_factor: float = 1.0,
    ) -> dict[str, Metric]:  # fmt: skip
        """One optimizer step of the critic on one mini-batch; by default on the algorithm's terms."""
        with self.phase("update_critic", "critic", *LEARNING):
            return self.update(batch, terms, counts, temperature=1.0, lr_factor=lr_factor)
