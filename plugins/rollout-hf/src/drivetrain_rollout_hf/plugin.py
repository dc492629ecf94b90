"""What this distribution offers: the rollout ``hf``."""

from __future__ import annotations

from collections.abc import Iterable

from drivetrain import RolloutSpec, hookimpl


@hookimpl
def drivetrain_rollouts() -> Iterable[RolloutSpec]:
    """Offer generation with transformers' models."""
    yield RolloutSpec(
        name="hf",
        summary="Generates with transformers' own models, also with the module that is being trained.",
        factory="drivetrain_rollout_hf.engine:HFRollout",
        config="drivetrain_rollout_hf.config:HFRolloutConfig",
        provides=("rollout.log_probs", "rollout.live_module", "rollout.own_weights", "rollout.load_weights"),
    )
