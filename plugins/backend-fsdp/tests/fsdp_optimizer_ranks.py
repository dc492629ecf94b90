"""What two processes do in test_fsdp_optimizers."""

from __future__ import annotations

from pathlib import Path

import fsdp_ranks
import fsdp_rig as rig
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from drivetrain import NonFiniteError, resolve
from drivetrain_backend_fsdp import config, gradients

SHAPES = {"embed": (6, 4), "wide": (5, 8), "tall": (7, 3), "experts": (3, 4, 6), "one_row": (1, 6), "bias": (5,)}
SECTIONS = {
    "adamw": config.AdamWConfig(lr=0.03, betas=(0.8, 0.9), weight_decay=0.1),
    "adamw_plain": config.AdamWConfig(lr=0.03, betas=(0.8, 0.9), weight_decay=0.1, fused=False),
    "muon": config.MuonConfig(lr=0.03, betas=(0.8, 0.9), weight_decay=0.1, adamw_lr=0.01),
    "muon_original": config.MuonConfig(lr=0.03, weight_decay=0.0, adjust_lr="original", nesterov=False),
}  # fmt: skip


def drawn(name: str, seed: int) -> Tensor:
    """A weight (seed 0) or the gradient of a step."""
    generator = torch.Generator().manual_seed(100 * seed + list(SHAPES).index(name))
    return torch.randn(SHAPES[name], generator=generator)


def train(section: str, mesh: DeviceMesh | None = None, plain: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """Whole weights after three steps; parameters are sharded over a mesh, except for those named ``plain``."""

    def place(name: str, tensor: Tensor) -> Tensor:
        return tensor if mesh is None or name in plain else distribute_tensor(tensor, mesh, [Shard(0)])

    parameters = {name: nn.Parameter(place(name, drawn(name, 0))) for name in SHAPES}
    options = SECTIONS[section]
    optimizer = resolve("optimizers", options.name)(parameters.items(), options)
    for step in range(1, 4):
        for name, parameter in parameters.items():
            parameter.grad = place(name, drawn(name, step))
        optimizer.step()
    return {name: whole(parameter) for name, parameter in parameters.items()}


def whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def clipped(mesh: DeviceMesh | None = None, plain: tuple[str, ...] = ()) -> tuple[float, dict[str, Tensor]]:
    """The norm of gradients and what is left of them after clipping to 0.7."""
    parameters = {}
    for name in SHAPES:
        there = mesh is None or name in plain
        made = [drawn(name, s) if there else distribute_tensor(drawn(name, s), mesh, [Shard(0)]) for s in (0, 1)]
        parameters[name] = nn.Parameter(made[0])
        parameters[name].grad = made[1]
    norm = gradients.total_norm(list(parameters.values()), torch.device("cpu"))
    gradients.clip(list(parameters.values()), 0.7, norm)
    return norm, {name: whole(parameter.grad) for name, parameter in parameters.items()}


def work(rank: int, model: Path, folder: Path, checkpoint: Path) -> None:
    """Run on each of two ranks, which write what they saw to ``folder/seen-<rank>.pt``."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    mixed = ("wide", "bias")
    seen: dict[str, object] = {
        "trained": {section: train(section, mesh) for section in SECTIONS},
        "mixed": {section: train(section, mesh, mixed) for section in SECTIONS},
        "clipped": [clipped(mesh), clipped(mesh, mixed)],
    }
    mine = slice(0, 9) if rank == 0 else slice(9, 12)
    made = muon_backend(model, rank=rank, world_size=2, max_skipped_steps=2)
    seen["updates"] = [fsdp_ranks.update(made, mine), fsdp_ranks.update(made, mine, 0.5)]
    (folder / "state").mkdir(exist_ok=True)
    made.save(folder / "state")
    seen["next"] = fsdp_ranks.update(made, mine)
    made.load(folder / "state")
    seen["again"] = fsdp_ranks.update(made, mine)
    made.load(checkpoint)  # written by one process
    seen["from_one"] = fsdp_ranks.update(made, mine)

    before = fsdp_ranks.whole_weights(made)
    good = rig.batch()
    broken = good if rank == 0 else good.with_columns(advantages=torch.full_like(good.batch["advantages"], torch.inf))
    seen["skipped"] = [skipping(made, data, mine) for data in (broken, broken)]
    seen["unchanged"] = all(tensor.equal(before[name]) for name, tensor in fsdp_ranks.whole_weights(made).items())
    seen["taken"] = skipping(made, good, mine)
    for _ in range(2):
        skipping(made, broken, mine)
    try:
        skipping(made, broken, mine)
    except NonFiniteError as error:
        seen["refused"] = str(error)
    torch.save(seen, folder / f"seen-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def muon_backend(folder: Path, **options):
    return rig.backend(folder, max_grad_norm=0.5, micro_batch_tokens=30, section=config.MuonConfig(lr=1e-3), **options)


def skipping(made, data, rows: slice) -> dict[str, float]:
    metrics = made.update(data[rows], rig.TERMS, rig.counts(data), temperature=0.8, lr_factor=1.0)
    return {name: metric.result() for name, metric in metrics.items()}
