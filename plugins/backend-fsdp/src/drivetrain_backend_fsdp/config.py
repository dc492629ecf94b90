"""Options of the backend and of the optimizer. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from pydantic import Field, field_validator

from drivetrain import OptimizerConfig, PluginConfig, Problem

if TYPE_CHECKING:
    from drivetrain import RunConfig
    from drivetrain.seam.registry import Registry


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
    sequence_parallel: int = Field(
        1,
        gt=0,
        description="Ranks that share each packed micro-batch, every one a part of its tokens and, in attention, of its"
        " heads (DeepSpeed-Ulysses). Divides the number of processes and of attention heads.",
    )

    def check(self, run: RunConfig, registry: Registry) -> Iterable[Problem]:
        judge = run.reward_model
        if self.sequence_parallel > 1 and judge is not None and judge.backend is self:
            mend = "set reward_model.backend={name: fsdp}" if self is run.actor.backend else "set it to 1"
            yield Problem(key="sequence_parallel", mend=mend, what="the classifier of role reward runs padded rows, of"
                          " which ranks hold no shares")  # fmt: skip


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
