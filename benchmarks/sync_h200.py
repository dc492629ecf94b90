"""Weights of Qwen2.5-7B's shape from the backend fsdp into vLLM on the same GPU: seconds, bandwidth, extra memory.

    python benchmarks/sync_h200.py [--shape 7b] [--syncs 6] [--hardware cuda] [--bucket-mib 256]

Random weights in bf16. The first sync checks the content of every weight. Extra memory is the most that the device has
in use during a sync beyond what it had before.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
from fsdp_h200 import write_folder

from drivetrain import BackendContext, GenerationRequest, RolloutContext, SamplingParams, resolve
from drivetrain.config import ModelConfig, PluginConfig
from drivetrain_backend_fsdp.config import FSDPConfig
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


def main() -> None:
    """Make both engines and send weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="7b")
    parser.add_argument("--syncs", type=int, default=6)
    parser.add_argument("--hardware", default="cuda")
    parser.add_argument("--bucket-mib", type=int, default=256)
    parser.add_argument("--sleep-level", type=int, default=2)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    write_folder(arguments.shape, folder)
    hardware = resolve("hardware", arguments.hardware)(PluginConfig(name=arguments.hardware))
    hardware.select(0)
    on_gpu = arguments.hardware == "cuda"
    model = ModelConfig(path=folder, dtype="bfloat16" if on_gpu else "float32", init="random")
    place = {"hardware": hardware, "rank": 0, "world_size": 1, "seed": 0}
    backend = resolve("backends", "fsdp")(FSDPConfig(), BackendContext(
        role="actor", model=model, optimizer=None, max_grad_norm=None, **place))  # fmt: skip
    with torch.device(hardware.device()):  # weights are drawn where they are needed
        backend.initialize()
    rollout = resolve("rollouts", "vllm")(
        VLLMRolloutConfig(name="vllm", max_response_tokens=8, max_model_tokens=1024, gpu_memory_utilization=0.5,
                          enforce_eager=True, sleep_level=arguments.sleep_level),
        RolloutContext(model=model, receives_weights=True, **place),
    )  # fmt: skip
    hybrid = resolve("hybrid_engines", "colocated")(ColocatedConfig(bucket_bytes=arguments.bucket_mib << 20))
    hybrid.attach(backend, rollout)
    rollout.initialize()
    request = GenerationRequest(request_id="one", prompt_token_ids=(5, 6, 7), seeds=(1, 2),
                                sampling=SamplingParams(max_tokens=8, ignore_eos=True))  # fmt: skip
    for version in range(arguments.syncs):
        hybrid.enter_training()
        hardware.synchronize()
        with Least(hardware) as least:
            metrics = hybrid.enter_generation(version)
        ((sample, _),) = rollout.generate_batch([request])
        assert len(sample.log_probs) == 8
        gib = {"before": least.before, "least": least.free, "after": hardware.memory().free}
        told = {f"free_{when}_gib": value / 2**30 for when, value in gib.items()} | dict(metrics)
        print(json.dumps({"sync": version} | {name: float(f"{value:.4g}") for name, value in told.items()}), flush=True)
    rollout.close()
    backend.close()


if __name__ == "__main__":
    main()
