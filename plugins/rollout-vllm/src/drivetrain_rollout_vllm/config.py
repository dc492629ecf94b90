"""The section ``rollout`` with ``name: vllm``. Imports neither torch nor vLLM."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from drivetrain import Problem, RolloutConfig

if TYPE_CHECKING:
    from drivetrain import RunConfig
    from drivetrain.seam.registry import Registry

SET_HERE = frozenset(
    {
        "model", "tokenizer", "trust_remote_code", "dtype", "seed", "load_format", "tensor_parallel_size",
        "distributed_executor_backend", "weight_transfer_config", "logprobs_mode", "enable_sleep_mode",
        "gpu_memory_utilization", "kv_cache_memory_bytes", "max_num_seqs", "max_num_batched_tokens", "max_model_len",
        "enforce_eager", "enable_prefix_caching", "enable_lora", "max_lora_rank", "max_loras",
    }
)  # fmt: skip
"""Arguments of vLLM that follow from other settings, or that this plugin depends on."""


class VLLMRolloutConfig(RolloutConfig):
    """Sampling, and what vLLM is given of the device."""

    tensor_parallel_size: int = Field(
        1, gt=0, description="Processes over which one engine is split; it divides the rollout's processes, and each "
        "such group of processes has an engine."
    )  # fmt: skip
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        None, description="Type that the engine computes in. Omitted: model.dtype."
    )
    gpu_memory_utilization: float = Field(
        0.5, gt=0, le=1, description="Share of a GPU's memory for the engine: weights, activations, keys and values."
    )
    kv_cache_bytes: int | None = Field(
        None, gt=0, description="Memory for keys and values on each device. Omitted: on a GPU, what "
        "gpu_memory_utilization leaves; on a CPU, 1 GiB."
    )  # fmt: skip
    max_sequences: int = Field(256, gt=0, description="Sequences that are decoded together; more wait.")
    max_batch_tokens: int | None = Field(
        None, gt=0, description="Tokens of one forward call, of prompts that are read too. Omitted: as vLLM does."
    )
    max_model_tokens: int | None = Field(
        None, gt=0, description="Longest prompt and response together. Omitted: what the model allows."
    )
    enforce_eager: bool | None = Field(
        None, description="Run without CUDA graphs and compilation. Omitted: on a CPU alone."
    )
    prefix_caching: bool = Field(True, description="Read what prompts begin with alike once.")
    sample_seeds: bool = Field(
        True, description="Draw each sample from its own seed, so that it depends neither on what is generated beside "
        "it nor on the placement. Off, one seed serves an engine; with many sequences that is faster in some versions."
    )  # fmt: skip
    sleep_level: Literal[0, 1, 2] = Field(
        2, description="What the engine gives up while the trainer has the device: 0 nothing, for a device that holds "
        "both; 1 keys and values, and its weights to the host's memory; 2 keys and values and its weights."
    )  # fmt: skip
    adapter_rank: int | None = Field(
        None, gt=0, le=512, description="Rank of the adapter that the engine is sent alone (hybrid_engine.lora: "
        "adapter), and computes with beside the weights of the model's folder. Omitted: it is sent all weights."
    )  # fmt: skip
    engine_args: dict[str, Any] = Field({}, description="Further arguments of vllm.EngineArgs, as they are there.")

    @model_validator(mode="after")
    def _arguments_are_free(self) -> VLLMRolloutConfig:
        if taken := sorted(SET_HERE.intersection(self.engine_args)):
            raise ValueError(f"engine_args.{taken[0]} follows from other settings of the run and cannot be set")
        return self

    @model_validator(mode="after")
    def _the_base_of_an_adapter_stays(self) -> VLLMRolloutConfig:
        if self.adapter_rank is not None and self.sleep_level == 2:
            raise ValueError("sleep_level=2 drops the weights to which an adapter is sent alone: set sleep_level=1,"
                             " which keeps them in the host's memory, or 0")  # fmt: skip
        return self

    def check(self, run: RunConfig, registry: Registry) -> Iterable[Problem]:
        if self is run.rollout:
            alone = "rollout.adapter" in run.hybrid_engine.required_capabilities()
            if alone and self.adapter_rank is None:
                yield Problem(key="adapter_rank", what="the hybrid engine sends the adapter alone, for which vLLM has "
                              "to make room", mend="set it to the rank of actor.backend.lora")  # fmt: skip
            if self.adapter_rank is not None and not alone:
                yield Problem(key="adapter_rank", what="the hybrid engine sends all weights",
                              mend="set hybrid_engine.lora=adapter, or remove it")  # fmt: skip
        processes = run.processes_of("rollout")
        if processes is not None and processes % self.tensor_parallel_size:
            yield Problem(
                key="tensor_parallel_size", mend="choose a size that divides them",
                what=f"{processes} processes do not divide into engines of {self.tensor_parallel_size} "
                     f"({processes} = {processes // self.tensor_parallel_size} x {self.tensor_parallel_size} + "
                     f"{processes % self.tensor_parallel_size})",
            )  # fmt: skip
        if processes is None and self.tensor_parallel_size > 1:
            yield Problem(key="tensor_parallel_size", what="this run has one process",
                          mend="choose an executor with several, such as ray, or set it to 1")  # fmt: skip
