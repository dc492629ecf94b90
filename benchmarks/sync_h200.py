"""Weights of Qwen2.5-7B's shape from a backend into vLLM on the same GPUs: seconds, bandwidth, extra memory.

    python benchmarks/sync_h200.py [--shape 7b] [--syncs 6] [--hardware cuda] [--bucket-mib 512]
    python benchmarks/sync_h200.py --processes 2 --engine-size 2                         # FSDP to one engine of TP2
    python benchmarks/sync_h200.py --processes 2 --backend megatron --backend-size 2     # TP2 to two engines of TP1

Random weights in bf16. The first sync checks the content of every weight, later ones a sample. Rank 0 prints a line a
sync: what the hybrid engine tells, and free memory of the device by its driver before, at the least and after.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fsdp_h200 import write_folder
from transformers import AutoModelForCausalLM

from drivetrain import BackendContext, GenerationRequest, RolloutContext, SamplingParams, resolve
from drivetrain.config import ModelConfig, PluginConfig
from drivetrain.seam.registry import get_registry
from drivetrain_hybrid_engine.config import ColocatedConfig
from drivetrain_rollout_vllm.config import VLLMRolloutConfig


class Least:
    """The least free memory of a device while a context is open, looked at every two milliseconds."""

    def __init__(self, hardware: Any) -> None:
        self._hardware, self._over = hardware, threading.Event()
        self.free = self.before = hardware.memory().free
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._over.wait(0.002):
            self.free = min(self.free, self._hardware.memory().free)

    def __enter__(self) -> Least:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def work(rank: int, folder: Path, given: argparse.Namespace) -> None:
    """Make both engines on a rank and send weights."""
    hardware = resolve("hardware", given.hardware)(PluginConfig(name=given.hardware))
    hardware.select(rank)
    if given.processes > 1:
        dist.init_process_group(hardware.communication_backend, init_method=f"file://{folder}/rendezvous", rank=rank,
                                world_size=given.processes)  # fmt: skip
    on_gpu = given.hardware == "cuda"
    model = ModelConfig(path=folder / "model", dtype="bfloat16" if on_gpu else "float32")
    place: dict[str, Any] = {"hardware": hardware, "rank": rank, "world_size": given.processes, "seed": 0}
    section = get_registry().config_model("backends", given.backend)
    sizes = {"tensor_model_parallel_size": given.backend_size} if given.backend == "megatron" else {}
    backend = resolve("backends", given.backend)(
        section(name=given.backend, **sizes),
        BackendContext(role="ref", model=model, optimizer=None, max_grad_norm=None, **place),
    )
    backend.initialize()
    memory = {} if on_gpu else {"kv_cache_bytes": 1 << 26}
    rollout = resolve("rollouts", "vllm")(
        VLLMRolloutConfig(name="vllm", max_response_tokens=8, max_model_tokens=1024, gpu_memory_utilization=0.5,
                          enforce_eager=True, sleep_level=given.sleep_level, tensor_parallel_size=given.engine_size,
                          **memory),
        RolloutContext(model=model, receives_weights=True, **place),
    )  # fmt: skip
    hybrid = resolve("hybrid_engines", "colocated")(
        ColocatedConfig(bucket_bytes=given.bucket_mib << 20, sharing="never")
    )
    hybrid.attach(backend, rollout)
    rollout.initialize()
    request = GenerationRequest(request_id="one", prompt_token_ids=(5, 6, 7), seeds=(1, 2),
                                sampling=SamplingParams(max_tokens=8, ignore_eos=True))  # fmt: skip
    for version in range(given.syncs):
        slept = hybrid.enter_training()
        hardware.synchronize()
        if given.processes > 1:
            dist.barrier()
        with Least(hardware) as least:
            metrics = hybrid.enter_generation(version)
        ((sample, _),) = rollout.generate_batch([request])
        assert len(sample.log_probs) == 8
        if rank == 0:
            gib = {"before": least.before, "least": least.free, "after": hardware.memory().free}
            told = {f"free_{when}_gib": value / 2**30 for when, value in gib.items()} | dict(slept) | dict(metrics)
            line = {"sync": version} | {name: float(f"{value:.4g}") for name, value in told.items()}
            print(json.dumps(line), flush=True)
    rollout.close()
    backend.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def main() -> None:
    """Draw weights, and start a process for each device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="7b")
    parser.add_argument("--syncs", type=int, default=6)
    parser.add_argument("--hardware", default="cuda")
    parser.add_argument("--bucket-mib", type=int, default=512)
    parser.add_argument("--sleep-level", type=int, default=2)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--backend", default="fsdp", choices=["fsdp", "megatron"])
    parser.add_argument("--backend-size", type=int, default=1, help="tensor parallelism of backend megatron")
    parser.add_argument("--engine-size", type=int, default=1, help="tensor parallelism of vLLM")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = write_folder(given.shape, folder / "model")
        on_gpu = given.hardware == "cuda"
        torch.manual_seed(0)
        with torch.device("cuda" if on_gpu else "cpu"):
            drawn = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if on_gpu else torch.float32)
        drawn.save_pretrained(folder / "model")
        del drawn
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
        if given.processes == 1:
            work(0, folder, given)
        else:
            torch.multiprocessing.spawn(work, args=(folder, given), nprocs=given.processes)


if __name__ == "__main__":
    main()
