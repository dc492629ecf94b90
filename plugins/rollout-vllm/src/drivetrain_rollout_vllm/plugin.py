"""What this distribution offers: the rollout ``vllm``. Imports neither torch nor vLLM."""

from __future__ import annotations

from collections.abc import Iterable

from drivetrain import RolloutSpec, hookimpl


@hookimpl
def drivetrain_rollouts() -> Iterable[RolloutSpec]:
    """Offer generation with vLLM."""
    yield RolloutSpec(
        name="vllm",
        summary="Generates with vLLM: paged attention, prefix caching, CUDA graphs; tensor parallel over workers.",
        factory="drivetrain_rollout_vllm.engine:VLLMRollout",
        config="drivetrain_rollout_vllm.config:VLLMRolloutConfig",
        provides=(
            "rollout.log_probs",
            "rollout.own_weights",
            "rollout.load_weights",
            "rollout.adapter",
            "rollout.sleep",
        ),
    )
