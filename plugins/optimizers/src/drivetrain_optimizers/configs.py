"""Options of the optimizers. Imports no torch."""

from __future__ import annotations

from pydantic import Field, field_validator

from drivetrain import OptimizerConfig


class AdamW8bitConfig(OptimizerConfig):
    """The section ``optimizer`` with ``name: adamw_8bit``."""

    name: str = Field("adamw_8bit", description="Name of the plugin.")
    betas: tuple[float, float] = Field((0.9, 0.999), description="Decay of the running mean and mean square.")
    eps: float = Field(1e-8, gt=0, description="Added to the root of the mean square.")
    weight_decay: float = Field(
        0.01, ge=0, description="Share of lr by which matrices shrink each step; norms and biases do not."
    )
    block_size: int = Field(
        128,
        ge=16,
        description="Neighbours in a row that share a scale. A matrix whose row is no multiple of it keeps moments of"
        " float32.",
    )
    compile: bool | None = Field(
        None,
        description="Make one kernel of a step by torch.compile. Omitted: on every device but a CPU. Rounding differs"
        " a little between both.",
    )

    @field_validator("betas")
    @classmethod
    def _betas_are_shares(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas lie in [0, 1); got {betas}")
        return betas
