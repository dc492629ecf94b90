"""Options of the backend and of the optimizer. Imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from drivetrain import OptimizerConfig, PluginConfig


class FSDPConfig(PluginConfig):
    """The section ``backend`` with ``name: fsdp``."""

    name: str = Field("fsdp", description="Name of the plugin.")
    micro_batch_tokens: int | None = Field(
        None,
        gt=0,
        description="Tokens of one packed micro-batch; a longer sequence travels alone. Omitted: 2048 on a CPU, whose"
        " caches hold little, and 16384 elsewhere.",
    )
    log_prob_chunk_tokens: int | None = Field(
        None,
        gt=0,
        description="Tokens whose logits over the vocabulary exist at one time. Omitted: 2048 on a CPU, so that those"
        " of a micro-batch need no second computation, and 1024 elsewhere.",
    )
    gradient_checkpointing: bool = Field(
        False, description="Keep only each layer's input for the backward pass and compute the layer again."
    )
    compute_dtype: Literal["bfloat16"] | None = Field(
        None,
        description="Type of matrix products, beneath weights of model.dtype; with several processes also that in which"
        " weights are gathered. Omitted: model.dtype.",
    )
    shard_size: int | None = Field(
        None,
        gt=0,
        description="Processes that a copy of the model is sharded over; with fewer than all, each group of so many"
        " has a copy, and gradients are summed in the group and then between groups. Fits the GPUs of a node, where the"
        " links between nodes are slow and a copy fits a node. Omitted: all processes share one copy.",
    )
    reshard_after_forward: bool = Field(
        True,
        description="Give up a layer's gathered weights after its forward pass and gather them again for the backward"
        " pass. False saves that second gathering and holds the whole model's weights, in the type that is computed"
        " in, until the backward pass.",
    )


class AdamWConfig(OptimizerConfig):
    """The section ``optimizer`` with ``name: adamw``."""

    name: str = Field("adamw", description="Name of the plugin.")
    betas: tuple[float, float] = Field((0.9, 0.999), description="Decay of the running mean and mean square.")
    eps: float = Field(1e-8, gt=0, description="Added to the root of the mean square.")
    weight_decay: float = Field(
        0.01, ge=0, description="Share of lr by which matrices shrink each step; norms and biases do not."
    )

    @field_validator("betas")
    @classmethod
    def _betas_are_shares(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas lie in [0, 1); got {betas}")
        return betas
