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
        None, description="Type of matrix products, beneath weights of model.dtype. Omitted: model.dtype."
    )
    max_skipped_steps: int = Field(
        0,
        ge=0,
        description="Updates in a row that may be skipped because the loss or the norm of its gradient is not finite;"
        " one more stops the run. A skipped update changes no weight and no moment.",
    )


class AdamWConfig(OptimizerConfig):
    """The section ``optimizer`` with ``name: adamw``."""

    name: str = Field("adamw", description="Name of the plugin.")
    betas: tuple[float, float] = Field((0.9, 0.999), description="Decay of the running mean and mean square.")
    eps: float = Field(1e-8, gt=0, description="Added to the root of the mean square.")
    weight_decay: float = Field(
        0.01, ge=0, description="Share of lr by which matrices shrink each step; norms and biases do not."
    )
    fused: bool | None = Field(
        None, description="Update many parameters in one kernel. Omitted: where the device has such a kernel."
    )

    @field_validator("betas")
    @classmethod
    def _betas_are_shares(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas lie in [0, 1); got {betas}")
        return betas


class MuonConfig(AdamWConfig):
    """The section ``optimizer`` with ``name: muon``; ``betas``, ``eps`` and ``fused`` are of the parameters that AdamW
    trains."""

    name: str = Field("muon", description="Name of the plugin.")
    momentum: float = Field(0.95, ge=0, lt=1, description="Decay of the running mean of a matrix's gradient.")
    nesterov: bool = Field(True, description="Look ahead: mix the gradient into the running mean once more.")
    ns_steps: int = Field(5, ge=1, le=20, description="Newton-Schulz iterations that orthogonalise a matrix.")
    adjust_lr: Literal["match_rms_adamw", "original"] = Field(
        "match_rms_adamw",
        description="Factor of lr of a (rows, columns) matrix: 0.2 sqrt(max(rows, columns)), with which updates are as"
        " large as AdamW's, so that its lr fits; or sqrt(max(1, rows / columns)).",
    )
    adamw_lr: float | None = Field(
        None, gt=0, description="Learning rate of the parameters that AdamW trains. Omitted: lr."
    )
    adamw_names: tuple[str, ...] = Field(
        ("embed", "wte", "wpe", "lm_head", "score", "classifier"),
        description="AdamW trains matrices with one of these in their name, and whatever is no matrix.",
    )
