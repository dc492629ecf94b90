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
    param_offload: bool = Field(
        False, description="Keep the parameters in pinned host memory while no call needs them."
    )
    grad_offload: bool = Field(
        False,
        description="Sum the gradients of an update's micro-batches in host memory, so that those of earlier ones take"
        " no device memory. With one micro-batch nothing moves, and between updates there are no gradients.",
    )
    optimizer_offload: bool = Field(
        False, description="Keep the optimizer's moments in pinned host memory, but for the time of an update."
    )
    activation_offload: bool = Field(
        False,
        description="Keep in host memory what layers save for the backward pass; with gradient_checkpointing, their"
        " inputs.",
    )
    cpu_offload: bool = Field(
        False,
        description="Hold the shards of parameters, gradients and moments in host memory, gather layers from there and"
        " take the optimizer's steps on the host. For several processes, in place of the three offloads above.",
    )

    def check(self, run: RunConfig, registry: Registry) -> Iterable[Problem]:
        if self.cpu_offload:
            for key in ("param_offload", "grad_offload", "optimizer_offload"):
                if getattr(self, key):
                    yield Problem(key=key, what="with cpu_offload that part is in host memory all the time",
                                  mend=f"remove {key}, or cpu_offload")  # fmt: skip
        if self.param_offload and self == run.actor.backend and run.rollout is not None:
            engine = registry.select("hybrid_engines", run.hybrid_engine.name).spec
            if "backend.live_module" in {*engine.requires, *run.hybrid_engine.required_capabilities()}:
                yield Problem(key="param_offload", what=f"hybrid engine {engine.name!r} generates with the trainer's"
                              " module, whose parameters have to stay on the device",
                              mend="set hybrid_engine={name: colocated, sharing: never}, or remove it")  # fmt: skip


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
