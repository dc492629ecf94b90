"""The section ``rollout`` with ``name: hf``."""

from __future__ import annotations

from pydantic import Field

from drivetrain import RolloutConfig


class HFRolloutConfig(RolloutConfig):
    """Sampling, and how much is decoded at once."""

    max_batch_sequences: int = Field(
        256, gt=0, description="Sequences that are decoded together; more wait until some have finished."
    )
