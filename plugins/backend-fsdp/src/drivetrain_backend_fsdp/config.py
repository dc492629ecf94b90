"""Options of the backend and of the optimizer. Imports no torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from pydantic import Field, field_validator, model_validator

from drivetrain import OptimizerConfig, PluginConfig, Problem, Section

if TYPE_CHECKING:
    from drivetrain import RunConfig
    from drivetrain.seam.registry import Registry

INSTALL_LORA = "pip install 'drivetrain-backend-fsdp[lora]'"


class LoRAConfig(Section):
    """A low-rank adapter that is trained in place of the model's weights."""

    rank: int = Field(16, gt=0, description="Rows of A and columns of B.")
    alpha: int = Field(32, gt=0, description="The product B A counts alpha / rank times.")
    targets: Literal["all-linear"] | tuple[str, ...] = Field(
        "all-linear",
        min_length=1,
        description="Which linear layers of the decoder have an adapter: all, or those of these names (q_proj), or of"
        " these ends of names (self_attn.q_proj).",
    )
    export: Literal["merged", "adapter"] = Field(
        "merged",
        description="What an export holds: the model with the adapter merged into its weights, or the adapter alone, as"
        " peft reads it.",
    )

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        """What is wrong with these settings in a run."""
        if importlib.util.find_spec("peft") is None:
            yield Problem(key="lora", what="adapters need peft, not installed here", mend=INSTALL_LORA)
        if self.export == "adapter" and run.model.init == "random":
            yield Problem(key="lora.export", what="the base of the adapter is drawn by this run and is in no folder",
                          mend="set export: merged, or model.init=pretrained")  # fmt: skip


class FSDPConfig(PluginConfig):
    """The section ``backend`` with ``name: fsdp``."""

    name: str = Field("fsdp", description="Name of the plugin.")
    micro_batch_tokens: int | None = Field(
        None,
        gt=0,
        description="Tokens of one packed micro-batch; a longer sequence travels alone. Omitted: 2048 on a CPU, whose"
        " caches hold little, and 16384 elsewhere.",
    )
    log_prob_chunk_tokens: int = Field(
        2048, gt=0, description="Tokens whose logits over the vocabulary exist at one time."
    )
    gradient_checkpointing: Literal["full", "selective"] | bool = Field(
        False,
        description="full (or true): keep only each layer's input for the backward pass and compute the layer again."
        " selective: keep also results of matrix products and of attention, and compute what lies between them again.",
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
    max_skipped_steps: int = Field(
        0,
        ge=0,
        description="Updates in a row that may be skipped because the loss or the norm of its gradient is not finite;"
        " one more stops the run. A skipped update changes no weight and no moment.",
    )
    lora: LoRAConfig | None = Field(
        None, description="Train an adapter alone. A model that does not learn has none. Omitted: train all weights."
    )
    sequence_parallel: int = Field(
        1,
        gt=0,
        description="Ranks that share each packed micro-batch, every one a part of its tokens and, in attention, of its"
        " heads (DeepSpeed-Ulysses). Divides the number of processes and of attention heads.",
    )
    attention: Literal["sdpa", "flex", "varlen", "flash_attention_2"] = Field(
        "sdpa",
        description="Kernel of attention over packed sequences. sdpa: PyTorch's fused causal kernel, for sequences of"
        " similar length at a time. flex: FlexAttention over the packed row. varlen: PyTorch's flash kernel for"
        " sequences of varying length (CUDA, half precision). flash_attention_2: that of the package flash-attn.",
    )
    compile: bool = Field(False, description="Compile each decoder layer with torch.compile.")
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
    log_prob_kernel: Literal["chunked", "triton"] | None = Field(
        None,
        description="What computes log-probabilities, entropies and their gradients from the logits of a chunk:"
        " PyTorch's operations (chunked), or kernels that read the logits once a pass (triton). Omitted: triton on"
        " devices of torch's type cuda, where the package triton is, and chunked elsewhere.",
    )

    @field_validator("gradient_checkpointing")
    @classmethod
    def _true_is_full(cls, given: Literal["full", "selective"] | bool) -> Literal["full", "selective"] | bool:
        return "full" if given is True else given

    @model_validator(mode="after")
    def _go_together(self) -> FSDPConfig:
        selective = self.gradient_checkpointing == "selective"
        for clash, what in (
            (selective and self.compile, "gradient_checkpointing=selective sees no operation of compiled layers: set it"
             " to full or false, or compile to false"),
            (selective and self.attention == "flex", "gradient_checkpointing=selective does not see attention of flex,"
             " which is compiled: set it to full, or attention to another kernel"),
            (selective and self.activation_offload, "activation_offload does not reach what"
             " gradient_checkpointing=selective keeps: set the latter to full"),
            (self.compile and self.activation_offload, "activation_offload does not see what compiled layers save: set"
             " compile to false"),
        ):  # fmt: skip
            if clash:
                raise ValueError(what)
        return self

    def provided_capabilities(self) -> tuple[str, ...]:
        return () if self.lora is None else ("backend.reference", "backend.adapter")

    def check(self, run: RunConfig, registry: Registry) -> Iterable[Problem]:
        if self.lora is not None:
            yield from self.lora.problems(run)
            if self not in [model.backend for model in (run.actor, run.critic) if model is not None]:
                yield Problem(key="lora", what="this model does not learn, so it has no adapter", mend="remove lora")
        judge = run.reward_model
        if judge is not None and judge.backend is self:
            for key, chosen in (("attention", self.attention != "sdpa"), ("compile", self.compile)):
                if chosen:
                    mend = "set reward_model.backend={name: fsdp}" if self is run.actor.backend else f"remove {key}"
                    yield Problem(key=key, what="the classifier of role reward runs padded rows, to which this does not"
                                  " apply", mend=mend)  # fmt: skip
        if self.sequence_parallel > 1 and judge is not None and judge.backend is self:
            mend = "set reward_model.backend={name: fsdp}" if self is run.actor.backend else "set it to 1"
            yield Problem(key="sequence_parallel", mend=mend, what="the classifier of role reward runs padded rows, of"
                          " which ranks hold no shares")  # fmt: skip
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
