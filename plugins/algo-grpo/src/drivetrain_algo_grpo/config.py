"""The settings of GRPO."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from drivetrain.config import PolicyGradientConfig


class GRPOConfig(PolicyGradientConfig):
    """The section ``algorithm`` when its name is ``grpo``."""

    advantage_keys: ClassVar[tuple[str, ...]] = ("normalize_by_std", "epsilon")
    kl_keys: ClassVar[tuple[str, ...]] = ("kl_kind", "kl_in")

    advantage: str = Field("grpo", description="Advantage estimator, by name.")
    normalize_by_std: bool = Field(True, description="Divide by the standard deviation of the group.")
    epsilon: float = Field(1e-6, gt=0, description="Added to that standard deviation.")
    kl_in: Literal["loss", "reward"] = Field("loss", description="Where the KL divergence is charged.")
