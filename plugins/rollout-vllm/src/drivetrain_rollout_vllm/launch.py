"""Making an engine of vLLM's in this process, one rank of it in each."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from drivetrain import RolloutContext, UserError

if TYPE_CHECKING:
    from drivetrain_rollout_vllm.config import VLLMRolloutConfig

CPU_KV_CACHE_BYTES = 1 << 30


def start(config: VLLMRolloutConfig, context: RolloutContext) -> Any:
    """An ``LLMEngine``, or this rank's part of one; all ranks of an engine are to be given the same requests.

    vLLM calls this the external launcher: each process runs a scheduler of its own, and these agree because they see
    the same requests. torch's process group is that of the workers; one process alone makes one.

    Raises:
        UserError: vLLM is not installed, or refuses the settings.
    """
    if find_spec("vllm") is None:
        raise UserError(
            "vLLM is not installed", where="rollout.name",
            mend="pip install 'drivetrain-rollout-vllm[cuda]'\nor, on CPUs, pip install 'drivetrain-rollout-vllm[cpu]'",
        )  # fmt: skip
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if context.hardware.device_type == "cpu":
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # else every process takes the same cores
    if not dist.is_initialized():
        backend = context.hardware.communication_backend
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch, at every name that vLLM looks up in it
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        from drivetrain_rollout_vllm.transfer import register

        register()
        with _launched(context), _random_state_kept(context), compilation(config, context):
            try:
                return LLMEngine.from_engine_args(EngineArgs(**arguments(config, context)))
            except (TypeError, ValueError) as error:
                raise UserError(f"vLLM refuses its settings: {error}", where="rollout") from error


def compilation(config: VLLMRolloutConfig, context: RolloutContext) -> AbstractContextManager[Any]:
    """A context in which vLLM compiles as it likes or, run eagerly, nothing: some of its helpers ask for it all the
    same, which takes a CPU half a minute. What others in the process compile stays as it is."""
    return torch.compiler.set_stance("force_eager") if eager(config, context) else nullcontext()


def eager(config: VLLMRolloutConfig, context: RolloutContext) -> bool:
    """Whether vLLM runs without CUDA graphs and compilation."""
    return context.hardware.device_type == "cpu" if config.enforce_eager is None else config.enforce_eager


def arguments(config: VLLMRolloutConfig, context: RolloutContext) -> dict[str, Any]:
    """Arguments of ``vllm.EngineArgs``."""
    from drivetrain_rollout_vllm.adapters import room
    from drivetrain_rollout_vllm.transfer import NAME

    on_cpu = context.hardware.device_type == "cpu"
    model = context.model
    memory: dict[str, Any] = {"gpu_memory_utilization": config.gpu_memory_utilization}
    if config.kv_cache_bytes is not None or on_cpu:
        memory["kv_cache_memory_bytes"] = config.kv_cache_bytes or CPU_KV_CACHE_BYTES
    if on_cpu and config.sample_seeds:  # of a prompt read in parts vLLM winds the seed's generator back, a GPU's alone
        memory["enable_chunked_prefill"] = False
    sent, adapter = context.receives_weights, {}
    if config.adapter_rank is not None:  # which alone is sent
        sent, adapter = False, {"enable_lora": True, "max_loras": 1, "max_lora_rank": room(config.adapter_rank)}
    return {
        "model": str(model.path), "tokenizer": str(model.tokenizer_path), "trust_remote_code": model.trust_remote_code,
        "dtype": config.dtype or model.dtype, "seed": context.seed % 2**31,
        "load_format": "dummy" if sent else "auto", "use_tqdm_on_load": False,
        "tensor_parallel_size": config.tensor_parallel_size, "distributed_executor_backend": "external_launcher",
        "weight_transfer_config": {"backend": NAME}, "logprobs_mode": "processed_logprobs",
        "enable_sleep_mode": not on_cpu and config.sleep_level > 0, "generation_config": "vllm",
        "disable_log_stats": True,
        "max_num_seqs": config.max_sequences, "max_num_batched_tokens": config.max_batch_tokens,
        "max_model_len": config.max_model_tokens, "enable_prefix_caching": config.prefix_caching,
        "enforce_eager": eager(config, context),
        **memory, **adapter, **config.engine_args,
    }  # fmt: skip


@contextmanager
def _launched(context: RolloutContext) -> Iterator[None]:
    """The environment of a process that torchrun has started, from which vLLM reads its rank and device."""
    place = {"RANK": context.rank, "LOCAL_RANK": context.hardware.local_index, "WORLD_SIZE": context.world_size}
    given = {name: os.environ.get(name) for name in place}
    os.environ.update({name: str(value) for name, value in place.items()})
    try:
        yield
    finally:
        for name, value in given.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _random_state_kept(context: RolloutContext) -> Iterator[None]:
    """vLLM seeds every generator of the process when it starts; the trainer's are not to know."""
    device, python, array = context.hardware.rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        context.hardware.set_rng_state(device)
        random.setstate(python)
        np.random.set_state(array)
