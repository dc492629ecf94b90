"""The backend megatron in bfloat16 on GPUs against the backend fsdp on the same weights, layout by layout.

    python benchmarks/megatron_equal.py [--processes 2] [--shape 0.5b] [--tokens 8192]

A dense model of Qwen2.5's shape, and a Mixtral of the same width with few layers, with random weights that bfloat16
holds exactly. The yardstick is the backend fsdp on one device in float32: log-probabilities, and the losses and norms
of gradients of some updates, by the loss clip from these log-probabilities, with AdamW. Backend fsdp with weights in
bfloat16 says what rounding alone makes of them. No layout of megatron may be farther from float32 than that by more
than a quarter: in the mean of log-probabilities, in a loss, in a norm. Otherwise the exit code is 1.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsdp_h200
import machine
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor
from transformers import AutoModelForCausalLM, MixtralConfig

from drivetrain import BackendContext, DataProto, Hardware, LossTerm, resolve
from drivetrain.config import ModelConfig, PluginConfig
from drivetrain.numerics import Counts

UPDATES = 3
FARTHER = 1.25
TP, SP, DO = "tensor_model_parallel_size", "sequence_parallel", "use_distributed_optimizer"
PP, VPP = "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"
CP, EP, ETP = "context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"
LAYOUTS: dict[int, dict[str, tuple[str, dict[str, Any]]]] = {
    1: {"one device": ("dense", {}), "one device, experts": ("experts", {})},
    2: {
        "TP 2": ("dense", {TP: 2}),
        "TP 2, SP": ("dense", {TP: 2, SP: True}),
        "PP 2": ("dense", {PP: 2}),
        "PP 2, VPP 2": ("dense", {PP: 2, VPP: 2}),
        "CP 2": ("dense", {CP: 2}),
        "DP 2": ("dense", {}),
        "DP 2, distributed optimizer": ("dense", {DO: True}),
        "EP 2": ("experts", {EP: 2}),
        "EP 2, TP 2, SP": ("experts", {EP: 2, TP: 2, SP: True, ETP: 1}),
    },
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a backend makes of the batch.

    Attributes:
        log_probs: ``(rows, response)`` before the first update.
        losses, norms: of each update.
    """

    log_probs: Tensor
    losses: list[float]
    norms: list[float]


def write_models(shape: str, folder: Path, device: torch.device) -> int:
    """Folders of both models; the tokens that both know."""
    config = fsdp_h200.write_folder(shape, folder / "dense")
    fsdp_h200.write_folder(shape, folder / "experts")
    sizes = fsdp_h200.SHAPES[shape]
    experts = MixtralConfig(
        hidden_size=sizes["hidden_size"], intermediate_size=sizes["hidden_size"], num_hidden_layers=4,
        num_attention_heads=sizes["num_attention_heads"], num_key_value_heads=2, num_local_experts=8,
        vocab_size=min(config.vocab_size, 32000), max_position_embeddings=8192, sliding_window=None, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    for name, one in (("dense", config), ("experts", experts)):
        torch.manual_seed(0)
        with torch.device(device):
            AutoModelForCausalLM.from_config(one, dtype=torch.bfloat16).save_pretrained(folder / name)
    return int(experts.vocab_size)


def run(
    folder: Path,
    batch: DataProto,
    backend: str,
    dtype: str,
    hardware: Hardware,
    rank: int,
    world: int,
    updates: int = UPDATES,
    **options: Any,
) -> Found:
    """Evaluate and update; the result is whole on every rank."""
    from drivetrain_backend_fsdp.config import AdamWConfig, FSDPConfig
    from drivetrain_backend_megatron.config import MegatronConfig

    context = BackendContext(
        role="actor", model=ModelConfig(path=folder, dtype=dtype), optimizer=AdamWConfig(lr=1e-6), max_grad_norm=1.0,
        hardware=hardware, rank=rank, world_size=world, seed=0,
    )  # fmt: skip
    kind: Any = FSDPConfig if backend == "fsdp" else MegatronConfig
    made = resolve("backends", backend)(kind(name=backend, micro_batch_tokens=4096, **options), context)
    made.initialize()
    where = made.layout
    mine = list(range(len(batch)))[where.dp :: where.dp_size]
    own, counts = batch[mine], Counts.of(batch["response_mask"])
    log_probs = torch.zeros(batch["response_mask"].shape, device=hardware.device())
    found = made.forward(own, ("log_probs",), temperature=1.0)["log_probs"].to(log_probs)
    if where.tp == where.cp == where.pp == 0:  # one rank says them; the sum over ranks is below
        log_probs[mine] = found
    losses, norms = [], []
    for _ in range(updates):
        metrics = made.update(own, (LossTerm("clip"),), counts, temperature=1.0, lr_factor=1.0)
        losses.append(metrics["loss"].result())
        norms.append(metrics["grad_norm"].result())
    made.close()
    gc.collect()
    hardware.empty_cache()
    if world > 1:
        dist.all_reduce(log_probs)
    return Found(log_probs=log_probs.cpu(), losses=losses, norms=norms)


def work(rank: int, processes: int, folder: Path, batches: dict[str, DataProto], kind: str, titles: list[str]) -> None:
    """Each layout, on each process."""
    hardware: Hardware = resolve("hardware", kind)(PluginConfig(name=kind))
    hardware.select(rank)
    dist.init_process_group(
        hardware.communication_backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=processes
    )
    for number, title in enumerate(titles):
        model, options = LAYOUTS[processes][title]
        found = run(folder / model, batches[model], "megatron", "bfloat16", hardware, rank, processes, **options)
        if not rank:
            torch.save(vars(found), folder / f"found-{number}.pt")
    dist.destroy_process_group()


def main() -> None:
    """Compare every layout of so many processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, choices=list(LAYOUTS), default=2)
    parser.add_argument("--layouts", nargs="+", metavar="LAYOUT", help=f"some of {', '.join(LAYOUTS[2])}")
    parser.add_argument("--shape", choices=list(fsdp_h200.SHAPES), default="0.5b")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--hardware", default="cuda")
    given = parser.parse_args()
    chosen = given.layouts or list(LAYOUTS[given.processes])
    hardware: Hardware = resolve("hardware", given.hardware)(PluginConfig(name=given.hardware))
    device = f"{given.processes} x {hardware.device_name()}"
    versions = machine.versions("torch", "transformers", "megatron-core")
    head = {"device": device, "versions": versions, "bounds": f"{FARTHER} x fsdp in bfloat16"}
    print("\n".join(machine.head("Backend megatron against backend fsdp", head, sys.argv[1:])))
    titles = ["layout", "log-probs from float32: mean", "largest", "from fsdp in bfloat16: mean", "largest",
              "loss", "grad norm, relative"]  # fmt: skip
    print("\n" + "\n".join(machine.table(titles, [])), flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        vocabulary = write_models(given.shape, folder, hardware.device())
        hardware.empty_cache()
        batch, lengths = fsdp_h200.workload(given.tokens, vocabulary, 2048)
        exact, rounded = {}, {}
        batches = {}
        for model in ("dense", "experts"):
            drawn = run(folder / model, batch, "fsdp", "float32", hardware, 0, 1, updates=0).log_probs
            batches[model] = batch.with_columns(old_log_probs=drawn)
            exact[model] = run(folder / model, batches[model], "fsdp", "float32", hardware, 0, 1)
            rounded[model] = run(folder / model, batches[model], "fsdp", "bfloat16", hardware, 0, 1)
        arguments = (given.processes, folder, batches, given.hardware, chosen)
        multiprocessing.spawn(work, arguments, nprocs=given.processes)
        mask = batch["response_mask"] == 1
        wrong, bounds = [], dict[str, list[float]]()
        rows = {f"fsdp in bfloat16, {model}": (model, found) for model, found in rounded.items()}
        for number, title in enumerate(chosen):
            rows[title] = LAYOUTS[given.processes][title][0], Found(**torch.load(folder / f"found-{number}.pt"))
        for title, (model, found) in rows.items():
            apart = {kind: (found.log_probs - other[model].log_probs)[mask].abs()
                     for kind, other in (("exact", exact), ("rounded", rounded))}  # fmt: skip
            loss = max(abs(a - b) for a, b in zip(found.losses, exact[model].losses))
            norm = max(abs(a / b - 1) for a, b in zip(found.norms, exact[model].norms))
            cells = [f"{value:.1e}" for kind in apart for value in (apart[kind].mean(), apart[kind].max())]
            print(f"| {' | '.join([title, *cells, f'{loss:.1e}', f'{norm:.1e}'])} |", flush=True)
            seen = float(apart["exact"].mean()), loss, norm
            most = bounds.setdefault(model, [FARTHER * value for value in seen])  # fsdp's come first
            if any(value > bound for value, bound in zip(seen, most)):
                wrong.append(title)
    tokens = sum(map(sum, lengths))
    print(f"\n{len(lengths)} rows, {tokens:,} tokens; the first norm of gradients is {exact['dense'].norms[0]:.3f}.")
    if wrong:
        sys.exit(f"outside the bounds: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
