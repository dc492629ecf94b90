"""The settings of supervised fine-tuning."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from drivetrain.config import AlgorithmConfig


class SFTConfig(AlgorithmConfig):
    """The section ``algorithm`` when its name is ``sft``."""

    epochs: int = Field(1, ge=1, description="Passes over a batch.")
    aggregation: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"] = Field(
        "token-mean", description="How losses of tokens become one number."
    )
