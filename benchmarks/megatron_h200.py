"""Log-probs, updates and weights of the backend megatron on one or several GPUs of a host.

    python benchmarks/megatron_h200.py [--processes 2] [--shapes 0.5b 7b] [--budget 8192] [--attention varlen]
        [--ways tensor_model_parallel_size=2,sequence_parallel=true use_distributed_optimizer=true]
    python benchmarks/megatron_h200.py --hardware cpu --shapes small --tokens 600 --longest 64      # to try it

Qwen2.5's shapes with random weights in bf16, whose optimizer and gradients are in float32; work and what is counted are
those of ``fsdp_h200.py``. A way is options of the backend; all ways of a shape start from the same weights, so that
their first losses and norms of gradients are alike but for rounding. The weights are lent whole in buckets of 256 MiB,
as rollouts get them, and each process passes over all of them. Seconds are medians, the slowest process counts, and a
peak is the largest of the processes.
"""

from __future__ import annotations

import argparse
import functools
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
import yaml
from transformers import AutoModelForCausalLM, Qwen2Config

from drivetrain import BackendContext, DataProto, Hardware, LossTerm, resolve
from drivetrain.config import ModelConfig, PluginConfig
from drivetrain.numerics import Counts

BUCKET_BYTES = 256 * 2**20
WAYS = {
    1: [""],
    2: ["tensor_model_parallel_size=2,sequence_parallel=true", "use_distributed_optimizer=true",
        "pipeline_model_parallel_size=2", "context_parallel_size=2"],
}  # fmt: skip
TITLES = ["shape", "way", "log-probs tokens/s", "MFU", "peak GiB", "update tokens/s", "MFU", "optimizer s", "peak GiB",
          "weights s", "GB/s", "loss", "grad norm"]  # fmt: skip


def options(way: str) -> dict[str, Any]:
    """Of ``name=value,name=value``."""
    pairs = (pair.partition("=") for pair in way.split(",") if pair)
    return {name: yaml.safe_load(value) for name, _, value in pairs}


class Ours:
    """The backend megatron on this process."""

    def __init__(self, folder: Path, hardware: Hardware, rank: int, processes: int, chosen: dict[str, Any]) -> None:
        from drivetrain_backend_fsdp.config import AdamWConfig
        from drivetrain_backend_megatron.config import MegatronConfig

        context = BackendContext(
            role="actor", model=ModelConfig(path=folder, dtype="bfloat16"), optimizer=AdamWConfig(lr=1e-6),
            max_grad_norm=1.0, hardware=hardware, rank=rank, world_size=processes, seed=0,
        )  # fmt: skip
        self.made = resolve("backends", "megatron")(MegatronConfig(**chosen), context)
        self.made.initialize()
        self.optimizer = self.made.optimizer
        self.seen: list[dict[str, float]] = []

    def log_probs(self, batch: DataProto) -> None:
        self.made.forward(self._mine(batch), ("log_probs",), temperature=1.0)

    def update(self, batch: DataProto) -> None:
        counts = Counts.of(batch["response_mask"])
        found = self.made.update(self._mine(batch), (LossTerm("clip"),), counts, temperature=1.0, lr_factor=1.0)
        self.seen.append({name: found[name].result() for name in ("loss", "grad_norm")})

    def weights(self) -> int:
        """Pass over all weights; their bytes."""
        with self.made.weights(bucket_bytes=BUCKET_BYTES) as stream:
            return sum(entry.nbytes for bucket in stream for entry in bucket.entries if not entry.alias)

    def _mine(self, batch: DataProto) -> DataProto:
        where = self.made.layout
        return batch[list(range(len(batch)))[where.dp :: where.dp_size]]


def measured(made: Ours, batch: DataProto, hardware: Hardware, repeats: int) -> dict[str, Any]:
    """What this process takes."""
    made.log_probs(batch)
    forward, update = (
        fsdp_h200.measure(hardware, functools.partial(work, batch), made.optimizer, repeats)
        for work in (made.log_probs, made.update)
    )
    spent, nbytes = [], made.weights()
    for _ in range(repeats):
        hardware.synchronize()
        dist.barrier()
        start = time.perf_counter()
        made.weights()
        hardware.synchronize()
        spent.append(time.perf_counter() - start)
    return {"forward": forward, "update": update, "weights": statistics.median(spent), "nbytes": nbytes,
            **made.seen[0]}  # fmt: skip


def work(rank: int, folder: Path, given: argparse.Namespace) -> None:
    """Run on each process."""
    hardware: Hardware = resolve("hardware", given.hardware)(PluginConfig(name=given.hardware))
    hardware.select(rank)
    dist.init_process_group(
        hardware.communication_backend, init_method=f"file://{folder}/rendezvous", rank=rank,
        world_size=given.processes,
    )  # fmt: skip
    for shape in given.shapes:
        model = folder / shape
        if rank == 0:
            config = fsdp_h200.write_folder(shape, model)
            torch.manual_seed(0)
            with torch.device(hardware.device()):
                AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(model)
            gc.collect()
            hardware.empty_cache()
        dist.barrier()
        config = Qwen2Config.from_pretrained(model)
        batch, lengths = fsdp_h200.workload(given.tokens, config.vocab_size, given.longest)
        for way in given.ways or WAYS[given.processes]:
            chosen = {"attention": given.attention, "micro_batch_tokens": given.budget} | options(way)
            made: Any = Ours(model, hardware, rank, given.processes, chosen)
            own: Any
            try:
                own = measured(made, batch, hardware, given.repeats)
            except torch.OutOfMemoryError as error:
                if given.processes > 1:
                    raise  # the others wait
                own = str(error).splitlines()[0]
            made.made.close()
            made = None
            gc.collect()
            hardware.empty_cache()
            found: list[Any] = [None] * given.processes
            dist.all_gather_object(found, own)
            if rank == 0:
                cells = [found[0]] if isinstance(own, str) else figures(found, config, lengths)
                print(f"| {' | '.join([shape, way, *cells])} |", flush=True)
    if rank == 0:
        print(f"\n{len(lengths)} rows, {sum(map(sum, lengths)):,} tokens, the longest {max(map(sum, lengths)):,}.")
    dist.destroy_process_group()


def figures(found: list[dict[str, Any]], config: Qwen2Config, lengths: list[tuple[int, int]]) -> list[str]:
    """Cells of the table, from what the processes took."""
    tokens, whole = sum(map(sum, lengths)), fsdp_h200.flops(config, lengths)
    most = fsdp_h200.PEAK_FLOPS * len(found)
    cells = []
    for kind, times in (("forward", 1), ("update", 3)):
        seconds, step, peak = (max(one[kind][place] for one in found) for place in range(3))
        cells += [f"{tokens / seconds:,.0f}", f"{times * whole / seconds / most:.1%}"]
        cells += [f"{step:.3f}"] if kind == "update" else []
        cells += [f"{peak / 2**30:.1f}"]
    seconds, nbytes = max(one["weights"] for one in found), found[0]["nbytes"]
    return [*cells, f"{seconds:.3f}", f"{nbytes / seconds / 1e9:.1f}", f"{found[0]['loss']:.6f}",
            f"{found[0]['grad_norm']:.4f}"]  # fmt: skip


def main() -> None:
    """Print a table, a row a way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--shapes", nargs="+", choices=list(fsdp_h200.SHAPES), default=["0.5b", "7b"])
    parser.add_argument("--ways", nargs="+", help="options of the backend, name=value,name=value each")
    parser.add_argument("--hardware", default="cuda")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--budget", type=int, default=16384, help="tokens of a micro-batch")
    parser.add_argument("--longest", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--attention", help="kernel of attention")
    given = parser.parse_args()
    hardware: Hardware = resolve("hardware", given.hardware)(PluginConfig(name=given.hardware))
    print("\n".join(machine.head("Backend megatron on one host", {
        "device": f"{given.processes} x {hardware.device_name()}",
        "versions": machine.versions("torch", "transformers", "megatron-core"),
    }, sys.argv[1:])))  # fmt: skip
    print("\n" + "\n".join(machine.table(TITLES, [])), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(work, (Path(folder), given), nprocs=given.processes)


if __name__ == "__main__":
    main()
