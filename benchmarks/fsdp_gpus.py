"""Updates of the backend fsdp on several GPUs of a host, in each way of sharing the work, beside one GPU.

    python benchmarks/fsdp_gpus.py [--processes 2] [--shape 0.5b] [--tokens 131072] [--budget 16384]
        [--attention varlen]

Qwen2.5's shapes with weights in float32, computed in bfloat16; the step of ``fsdp_h200.py``. Each way starts from the
same folder and takes the same steps: losses and norms of gradients are those of one GPU but for rounding. Seconds are
the median of the updates after the first, the optimizer's step included; a peak is the largest of the processes.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import fsdp_h200
import machine
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from transformers import AutoModelForCausalLM

from drivetrain import BackendContext, DataProto, Hardware, LossTerm, resolve
from drivetrain.config import ModelConfig, PluginConfig
from drivetrain.numerics import Counts

UPDATES = 4


def ways(processes: int) -> dict[str, dict[str, Any]]:
    """Options of the backend, by title; the adapter's stand beside an adapter on one GPU."""
    return {
        "full shard": {},
        "weights kept after forward": {"reshard_after_forward": False},
        "a copy each": {"shard_size": 1},
        f"sequence_parallel {processes}": {"sequence_parallel": processes},
        "cpu_offload": {"cpu_offload": True},
        "param, grad, optimizer offload": {"param_offload": True, "grad_offload": True, "optimizer_offload": True},
        "lora, full shard": {"lora": {"rank": 16}},
    }


def updates(
    folder: Path,
    batch: DataProto,
    common: dict[str, Any],
    hardware: Hardware,
    rank: int,
    processes: int,
    options: dict[str, Any],
) -> dict[str, Any]:
    """What some updates of this process come to, with options of all ways and of this one."""
    from drivetrain_backend_fsdp.config import AdamWConfig, FSDPConfig

    context = BackendContext(
        role="actor", model=ModelConfig(path=folder, dtype="float32"), optimizer=AdamWConfig(lr=1e-5),
        max_grad_norm=1.0, hardware=hardware, rank=rank, world_size=processes, seed=0,
    )  # fmt: skip
    config = FSDPConfig(name="fsdp", compute_dtype="bfloat16", **common, **options)
    made = resolve("backends", "fsdp")(config, context)
    made.initialize()
    if made.offloads:
        made.offload(made.offloads)
    hardware.empty_cache()
    between = hardware.memory().allocated
    mine = list(range(len(batch)))[made.layout.dp :: made.layout.dp_size]
    counts, seconds, seen = Counts.of(batch["response_mask"]), [], []
    hardware.reset_peak()
    for _ in range(UPDATES):
        hardware.synchronize()
        start = time.perf_counter()
        if made.offloads:
            made.onload(made.offloads)
        metrics = made.update(batch[mine], (LossTerm("clip"),), counts, temperature=1.0, lr_factor=1.0)
        if made.offloads:
            made.offload(made.offloads)
        hardware.synchronize()
        seconds.append(time.perf_counter() - start)
        seen.append({name: metrics[name].result() for name in ("loss", "grad_norm")})
    peak = hardware.memory().peak
    made.close()
    gc.collect()
    hardware.empty_cache()
    return {"seconds": statistics.median(seconds[1:]), "peak": peak, "between": between, "seen": seen}


def work(rank: int, processes: int, folder: Path, batch: DataProto, common: dict[str, Any], kind: str) -> None:
    """Run on each process."""
    hardware: Hardware = resolve("hardware", kind)(PluginConfig(name=kind))
    hardware.select(rank)
    dist.init_process_group(
        hardware.communication_backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=processes
    )
    results = {}
    for title, options in ways(processes).items():
        own = updates(folder, batch, common, hardware, rank, processes, options)
        found: list[Any] = [None] * processes
        dist.all_gather_object(found, own)
        results[title] = {
            "seconds": max(one["seconds"] for one in found), "peak": max(one["peak"] for one in found),
            "between": max(one["between"] for one in found), "seen": own["seen"],
        }  # fmt: skip
    if not rank:
        torch.save(results, folder / "results.pt")
    dist.destroy_process_group()


def main() -> None:
    """Measure one GPU, then each way on several."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--shape", choices=list(fsdp_h200.SHAPES), default="0.5b")
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--budget", type=int, default=16384, help="tokens of a micro-batch")
    parser.add_argument("--attention", default="sdpa", help="its kernel")
    parser.add_argument("--hardware", default="cuda")
    given = parser.parse_args()
    hardware: Hardware = resolve("hardware", given.hardware)(PluginConfig(name=given.hardware))
    device, versions = f"{given.processes} x {hardware.device_name()}", machine.versions("torch", "transformers")
    print(
        "\n".join(
            machine.head("Backend fsdp on several devices", {"device": device, "versions": versions}, sys.argv[1:])
        )
    )
    titles = ["way", "tokens/s", "peak GiB", "GiB between updates", "loss, largest difference", "grad norm, relative"]
    print("\n" + "\n".join(machine.table(titles, [])), flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = fsdp_h200.write_folder(given.shape, folder)
        torch.manual_seed(0)
        with torch.device(hardware.device()):
            AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
        hardware.empty_cache()
        batch, lengths = fsdp_h200.workload(given.tokens, config.vocab_size, 4096)
        tokens = sum(map(sum, lengths))
        common = {"micro_batch_tokens": given.budget, "attention": given.attention}
        alone = {
            "one GPU": updates(folder, batch, common, hardware, 0, 1, {}),
            "one GPU, lora": updates(folder, batch, common, hardware, 0, 1, {"lora": {"rank": 16}}),
        }
        multiprocessing.spawn(work, (given.processes, folder, batch, common, given.hardware), nprocs=given.processes)
        for title, result in (alone | torch.load(folder / "results.pt")).items():
            like = alone["one GPU, lora" if "lora" in title else "one GPU"]["seen"]
            losses = max(abs(a["loss"] - b["loss"]) for a, b in zip(result["seen"], like))
            norms = max(abs(a["grad_norm"] / b["grad_norm"] - 1) for a, b in zip(result["seen"], like))
            cells = [title, f"{tokens / result['seconds']:,.0f}", f"{result['peak'] / 2**30:.1f}",
                     f"{result['between'] / 2**30:.1f}", f"{losses:.1e}", f"{norms:.1e}"]  # fmt: skip
            print(f"| {' | '.join(cells)} |", flush=True)
    print(f"\n{len(lengths)} rows, {tokens:,} tokens, the longest {max(map(sum, lengths)):,}.")


if __name__ == "__main__":
    main()
