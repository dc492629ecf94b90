"""Options of the backend. Imports no torch."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from drivetrain import PluginConfig, Problem, UserError
from drivetrain_backend_megatron.families import family

if TYPE_CHECKING:
    from drivetrain import RunConfig
    from drivetrain.seam.registry import Registry


TESTED = {
    "dense": ("", "TP", "PP", "PP x VPP", "CP", "TP x PP", "TP x PP x VPP", "TP x CP", "PP x CP"),
    "experts": ("", "TP", "PP", "CP", "EP", "TP x PP", "TP x EP", "PP x EP", "CP x EP"),
}
"""Combinations of parallelism that tests hold against transformers; each with data parallelism or without."""


class MegatronConfig(PluginConfig):
    """The section ``backend`` with ``name: megatron``."""

    name: str = Field("megatron", description="Name of the plugin.")
    tensor_model_parallel_size: int = Field(
        1, gt=0, description="Ranks that share each layer's matrices (TP). Divides attention heads and key-value heads."
    )
    pipeline_model_parallel_size: int = Field(
        1, gt=0, description="Stages of consecutive layers (PP). Divides the number of layers."
    )
    virtual_pipeline_model_parallel_size: int | None = Field(
        None,
        gt=1,
        description="Pieces of layers that each stage holds, which interleave (VPP). Needs at least two stages, and"
        " divides the layers of a stage.",
    )
    context_parallel_size: int = Field(
        1, gt=0, description="Ranks that share each sequence's tokens (CP), whose keys and values all of them gather."
    )
    expert_model_parallel_size: int = Field(
        1,
        gt=0,
        description="Ranks that share a layer's experts (EP). Divides the number of experts, and the processes of a"
        " stage.",
    )
    expert_tensor_parallel_size: int | None = Field(
        None, gt=0, description="Ranks that share each expert's matrices (ETP). Omitted: tensor_model_parallel_size."
    )
    sequence_parallel: bool = Field(
        False,
        description="Split tokens over the ranks of tensor parallelism where they compute the same, in norms and"
        " residuals. Experts with tensor parallelism need it.",
    )
    untested: bool = Field(
        False, description="Allow combinations of parallelism that no test holds against another engine."
    )
    transformer_impl: Literal["local", "transformer_engine"] = Field(
        "local",
        description="Whose linear layers and norms the model is made of: megatron-core's own, or those of the package"
        " transformer-engine. Attention is that of the option attention.",
    )
    attention: Literal["sdpa", "flex", "varlen", "flash_attention_2"] | None = Field(
        None,
        description="Kernel of attention over packed sequences. sdpa: PyTorch's fused causal kernel, for sequences of"
        " similar length at a time. flex: FlexAttention over the packed row; not with context parallelism. varlen:"
        " PyTorch's flash kernel for sequences of varying length (CUDA, half precision). flash_attention_2: that of the"
        " package flash-attn. Omitted: varlen on devices of torch's type cuda for models in half precision whose heads"
        " it takes, where torch has it, and sdpa elsewhere.",
    )

    recompute_granularity: Literal["full", "selective"] | None = Field(
        None,
        description="What is computed again in the backward pass, in place of being kept. full: layers, of which the"
        " input is kept. selective: the parts of layers that recompute_modules names. Omitted: nothing.",
    )
    recompute_method: Literal["uniform", "block"] | None = Field(
        None,
        description="With recompute_granularity full. uniform: the input of every recompute_num_layers layers is kept."
        " block: the first recompute_num_layers layers of a stage are computed again, one by one, and others are kept."
        " Omitted: uniform.",
    )
    recompute_num_layers: int | None = Field(
        None, gt=0, description="With recompute_granularity full: see recompute_method. Omitted: 1."
    )
    recompute_modules: tuple[Literal["core_attn", "mlp", "moe"], ...] | None = Field(
        None,
        min_length=1,
        description="With recompute_granularity selective: attention after its projections (core_attn), feed-forward"
        " layers (mlp), mixtures of experts (moe). Omitted: core_attn.",
    )

    moe_router_load_balancing_type: Literal["none", "aux_loss"] = Field(
        "none",
        description="aux_loss: an update also lowers moe_aux_loss_coeff times the sum over layers of experts *"
        " sum_i(share of choices of expert i * mean probability of i), the mean over micro-batches weighted by tokens.",
    )
    moe_aux_loss_coeff: float = Field(0.0, ge=0, description="Of moe_router_load_balancing_type aux_loss.")
    moe_z_loss_coeff: float | None = Field(
        None,
        gt=0,
        description="An update also lowers so much times the sum over layers of the mean over tokens of the square of"
        " the router's log-sum-exp.",
    )
    moe_router_dtype: Literal["fp32", "fp64"] = Field("fp32", description="Type in which routers compute.")
    moe_token_dispatcher_type: Literal["alltoall"] = Field(
        "alltoall",
        description="How tokens come to the ranks of their experts; packed micro-batches, which have other numbers of"
        " tokens on each rank, allow no other way.",
    )

    overlap_grad_reduce: bool = Field(
        False,
        description="Sum gradients over data parallel ranks bucket by bucket, while the last micro-batch's backward"
        " pass goes on.",
    )
    overlap_param_gather: bool = Field(
        False,
        description="With use_distributed_optimizer and overlap_grad_reduce: gather updated weights from data parallel"
        " ranks bucket by bucket, while the next forward pass goes on, or when something else needs them.",
    )
    ddp_bucket_size: int | None = Field(
        None,
        gt=0,
        description="Parameters of a bucket, with overlap_grad_reduce. Omitted: 40 million, or 1 million a data"
        " parallel rank if that is more.",
    )
    use_distributed_optimizer: bool = Field(
        False,
        description="Each data parallel rank keeps the optimizer's moments, and float32 copies of weights in half"
        " precision, of a share of the parameters (ZeRO-1).",
    )
    param_offload: bool = Field(
        False, description="Keep the parameters in pinned host memory while no call needs them."
    )
    grad_offload: bool = Field(
        False, description="Free the memory of the float32 buffers of gradients between updates, when they are empty."
    )
    optimizer_offload: bool = Field(
        False,
        description="Keep the optimizer's moments, and its float32 copies of weights in half precision, in pinned host"
        " memory, but for the time of an update.",
    )
    micro_batch_tokens: int | None = Field(
        None,
        gt=0,
        description="Tokens of one packed micro-batch, over the ranks of context parallelism; a longer sequence travels"
        " alone. Omitted: 2048 on a CPU, and 16384 elsewhere.",
    )
    log_prob_chunk_tokens: int = Field(
        2048, gt=0, description="Tokens whose logits over a rank's part of the vocabulary exist at one time."
    )
    log_prob_kernel: Literal["chunked", "triton"] | None = Field(
        None,
        description="What computes log-probabilities, entropies and their gradients from the logits of a chunk:"
        " PyTorch's operations (chunked), or kernels that read the logits once a pass (triton). Omitted: triton on"
        " devices of torch's type cuda, where the package triton is, and chunked elsewhere.",
    )
    max_skipped_steps: int = Field(
        0,
        ge=0,
        description="Updates in a row that may be skipped because the loss or the norm of its gradient is not finite;"
        " one more stops the run. A skipped update changes no weight and no moment.",
    )

    @property
    def expert_tensor_size(self) -> int:
        """Ranks that share each expert's matrices."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    def recomputation(self) -> dict[str, Any]:
        """megatron-core's options for what is computed again."""
        if self.recompute_granularity is None:
            return {}
        if self.recompute_granularity == "full":
            return {"recompute_granularity": "full", "recompute_method": self.recompute_method or "uniform",
                    "recompute_num_layers": self.recompute_num_layers or 1}  # fmt: skip
        return {
            "recompute_granularity": "selective",
            "recompute_modules": list(self.recompute_modules or ["core_attn"]),
        }

    def check(self, run: RunConfig, registry: Registry) -> Iterable[Problem]:
        yield from self.problems()
        roles = {"actor": run.actor, "critic": run.critic, "ref": run.ref, "reward_model": run.reward_model}
        mine = {role: part for role, part in roles.items() if part is not None and part.backend == self}
        models = {role: getattr(part, "model", None) or run.model for role, part in mine.items()}
        for role in mine:
            processes = run.processes_of(role.removesuffix("_model"))
            if processes and (why := self.sizes_problem(processes)):
                yield Problem(key="name", what=f"role {role.removesuffix('_model')}: {why}",
                              mend="let the sizes multiply to a divisor of the processes")  # fmt: skip
        optimizers: list[Any] = []  # those that were looked at: a critic may have the actor's
        for role in ("actor", "critic"):
            optimizer = getattr(mine.get(role), "optimizer", None)
            if optimizer is None or optimizer in optimizers:
                continue
            optimizers.append(optimizer)
            if optimizer.name != "adamw":
                yield Problem(key="name", what=f"backend megatron trains with optimizer adamw, by megatron-core's own"
                              f" Adam; the run asks for {optimizer.name!r}", mend=f"set {role}.optimizer.name=adamw, or"
                              " use backend fsdp")  # fmt: skip
            elif optimizer.departs("fused"):
                yield Problem(key="name", what="backend megatron chooses the kernel of its Adam by itself",
                              mend=f"remove {role}.optimizer.fused")  # fmt: skip
        if any(models[role].dtype == "float16" for role in ("actor", "critic") if role in models):
            yield Problem(key="name", what="backend megatron does not train in float16, which needs the loss scaled",
                          mend="set model.dtype=bfloat16, or use backend fsdp")  # fmt: skip
        for path in dict.fromkeys(model.path for model in models.values()):
            if (path / "config.json").is_file():
                for problem in self.model_problems(json.loads((path / "config.json").read_text())):
                    said = "" if path == run.model.path else f"{path}: "
                    yield replace(problem, what=said + problem.what)

    def problems(self) -> Iterable[Problem]:
        """What is wrong with the sizes among themselves."""
        if self.virtual_pipeline_model_parallel_size and self.pipeline_model_parallel_size == 1:
            what = "pieces of layers interleave over stages, and pipeline_model_parallel_size is 1"
            yield Problem(key="virtual_pipeline_model_parallel_size", what=what,
                          mend="remove it, or use at least 2 stages")  # fmt: skip
        yield from self._recompute_problems()
        if self.transformer_impl == "transformer_engine" and importlib.util.find_spec("transformer_engine") is None:
            yield Problem(key="transformer_impl", what="transformer_engine needs the package transformer-engine, not"
                          " installed here", mend="set it to local, or install transformer-engine")  # fmt: skip
        if (self.moe_router_load_balancing_type == "aux_loss") != (self.moe_aux_loss_coeff > 0):
            yield Problem(key="moe_aux_loss_coeff", what=f"it is {self.moe_aux_loss_coeff:g} with"
                          f" moe_router_load_balancing_type {self.moe_router_load_balancing_type}",
                          mend="set both, or remove both")  # fmt: skip
        for key, need in (("overlap_param_gather", "use_distributed_optimizer"),
                          ("overlap_param_gather", "overlap_grad_reduce"),
                          ("ddp_bucket_size", "overlap_grad_reduce")):  # fmt: skip
            if getattr(self, key) and not getattr(self, need):
                yield Problem(key=key, what=f"it needs {need}", mend=f"set {need}=true, or remove {key}")
        if self.attention == "flex" and self.context_parallel_size > 1:
            yield Problem(key="attention", what="flex does not compute attention of a part of each sequence, which a"
                          f" rank has with context_parallel_size {self.context_parallel_size}",
                          mend="set it to sdpa or varlen")  # fmt: skip
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            yield Problem(key="sequence_parallel", what="tokens are split over the ranks of tensor parallelism, and"
                          " tensor_model_parallel_size is 1", mend="remove it, or use at least 2 ranks")  # fmt: skip

    def _recompute_problems(self) -> Iterable[Problem]:
        kind = self.recompute_granularity
        for key, needs in (("recompute_method", "full"), ("recompute_num_layers", "full"),
                           ("recompute_modules", "selective")):  # fmt: skip
            if getattr(self, key) is not None and kind != needs:
                yield Problem(key=key, what=f"it goes with recompute_granularity {needs}, not with {kind}",
                              mend=f"remove it, or set recompute_granularity={needs}")  # fmt: skip

    def model_problems(self, model: Mapping[str, Any]) -> Iterable[Problem]:
        """What does not divide in a model.

        Args:
            model: content of a Hugging Face ``config.json``.
        """
        try:
            family(model)
        except UserError as error:
            yield Problem(key="name", what=error.what, mend=error.mend)
            return
        tp, pp, ep = (self.tensor_model_parallel_size, self.pipeline_model_parallel_size,
                      self.expert_model_parallel_size)  # fmt: skip
        heads, layers = model.get("num_attention_heads", 1), model.get("num_hidden_layers", 1)
        experts, width = model.get("num_local_experts"), model.get("intermediate_size", 0)
        sizes = {"TP": tp, "PP": pp, "VPP": (self.virtual_pipeline_model_parallel_size or 1) if pp > 1 else 1,
                 "CP": self.context_parallel_size, "EP": ep if experts else 1}  # fmt: skip
        combined = " x ".join(kind for kind, size in sizes.items() if size > 1)
        if not self.untested and combined not in TESTED["experts" if experts else "dense"]:
            yield Problem(key="name", what=f"{combined} is untested for a model {'with' if experts else 'without'}"
                          " experts", mend="use fewer kinds of parallelism, or set untested=true")  # fmt: skip
        yield from _divides("tensor_model_parallel_size", tp, heads, "attention heads")
        yield from _divides("tensor_model_parallel_size", tp, model.get("num_key_value_heads") or heads,
                            "key-value heads")  # fmt: skip
        vocab = model.get("vocab_size", tp)
        if -(-vocab // tp) * (tp - 1) >= vocab:
            yield Problem(key="tensor_model_parallel_size", mend="use fewer ranks",
                          what=f"with {tp} ranks the last one has none of the model's {vocab} tokens")  # fmt: skip
        yield from _divides("pipeline_model_parallel_size", pp, layers, "layers")
        if self.virtual_pipeline_model_parallel_size and layers % pp == 0:
            yield from _divides("virtual_pipeline_model_parallel_size", self.virtual_pipeline_model_parallel_size,
                                layers // pp, "layers of a stage")  # fmt: skip
        piece = layers // (pp * (self.virtual_pipeline_model_parallel_size or 1))
        if self.recompute_granularity == "full" and self.recompute_method != "block" and piece:
            yield from _divides("recompute_num_layers", self.recompute_num_layers or 1, piece, "layers of a piece")
        if experts:
            yield from _divides("expert_model_parallel_size", ep, experts, "experts")
            yield from _divides("expert_tensor_parallel_size", self.expert_tensor_size, width, "columns of an expert")
            if self.recompute_method == "block":
                yield Problem(key="recompute_method", what="with block megatron-core does not tell layers of experts"
                              " which tokens are padding", mend="set it to uniform")  # fmt: skip
            if "mlp" in (self.recompute_modules or ()):
                yield Problem(key="recompute_modules", what="all feed-forward layers are mixtures of experts",
                              mend="put moe in the place of mlp")  # fmt: skip
            if tp > 1 and not self.sequence_parallel:
                yield Problem(key="sequence_parallel", what=f"experts with tensor_model_parallel_size {tp} need it",
                              mend="set it to true")  # fmt: skip
            return
        yield from _divides("tensor_model_parallel_size", tp, width, "columns of the feed-forward layer")
        if "moe" in (self.recompute_modules or ()):
            yield Problem(key="recompute_modules", what="the model has no experts", mend="remove moe")
        for key in ("moe_aux_loss_coeff", "moe_z_loss_coeff"):
            if getattr(self, key):
                yield Problem(key=key, what="the model has no experts", mend=f"remove {key}")
        for key in ("expert_model_parallel_size", "expert_tensor_parallel_size"):
            if (getattr(self, key) or 1) > 1:
                yield Problem(key=key, what="the model has no experts", mend=f"remove {key}")

    def sizes_problem(self, processes: int) -> str:
        """Why so many processes do not fit the sizes; empty if they do."""
        tp, pp, cp, ep = (self.tensor_model_parallel_size, self.pipeline_model_parallel_size,
                          self.context_parallel_size, self.expert_model_parallel_size)  # fmt: skip
        if processes % (tp * pp * cp):
            return (f"{processes} processes are not a multiple of tensor {tp} x pipeline {pp} x context {cp} ="
                    f" {tp * pp * cp} parallel ranks")  # fmt: skip
        if processes % (self.expert_tensor_size * ep * pp):
            return (f"{processes} processes are not a multiple of expert tensor {self.expert_tensor_size} x expert {ep}"
                    f" x pipeline {pp} = {self.expert_tensor_size * ep * pp} parallel ranks")  # fmt: skip
        return ""


def _divides(key: str, size: int, total: int, what: str) -> Iterable[Problem]:
    if total % size:
        fitting = ", ".join(str(n) for n in range(1, min(total, 64) + 1) if total % n == 0)
        yield Problem(key=key, what=f"{size} does not divide the model's {total} {what}",
                      mend=f"{total} is divisible by {fitting}")  # fmt: skip
