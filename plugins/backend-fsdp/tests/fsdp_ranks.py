"""What two processes do in test_fsdp_ranks."""

from __future__ import annotations

from pathlib import Path

import fsdp_rig as rig
import torch
import torch.distributed as dist

from drivetrain import CheckpointError, NonFiniteError, RunError
from drivetrain_backend_fsdp import lora


def update(made, rows: slice, lr_factor: float = 1.0, data=None) -> dict[str, float]:
    """Each rank takes its rows; counts are those of all."""
    whole = rig.batch() if data is None else data
    metrics = made.update(whole[rows], rig.TERMS, rig.counts(whole), temperature=0.8, lr_factor=lr_factor)
    return {name: metrics[name].result() for name in ("loss", "grad_norm", "lr")}


def whole_weights(made) -> dict[str, torch.Tensor]:
    with made.weights(bucket_bytes=3000) as stream:
        return {e.name: e.tensor.clone() for bucket in stream for e in bucket.entries if not e.alias}


def shards(made) -> list[list[tuple[str, int, int, torch.Tensor]]]:
    """What a rank lends of its own: in each bucket name, place, places and tensor of each entry, aliases left out."""
    with made.weights(bucket_bytes=3000, sharded=True) as stream:
        return [
            [(e.name, e.placement.index, e.placement.count, e.tensor.clone()) for e in bucket.entries if not e.alias]
            for bucket in stream
        ]


def joined(ranks: list[list[list[tuple[str, int, int, torch.Tensor]]]]) -> tuple[dict[str, torch.Tensor], int]:
    """Whole tensors from the shards of all ranks, and how many were sharded; buckets are those of the first rank."""
    names = [[[name for name, *_ in bucket] for bucket in rank] for rank in ranks]
    assert all(other == names[0] for other in names)
    found, split = {}, 0
    for entries in zip(*(sum(rank, []) for rank in ranks), strict=True):
        name, _, count, tensor = entries[0]
        split += count > 1
        parts = {index: part for _, index, _, part in entries}
        assert sorted(parts) == list(range(count))
        found[name] = torch.cat([parts[index] for index in range(count)]) if count > 1 else tensor
    return found, split


def work(rank: int, model: Path, folder: Path, checkpoint: Path) -> None:
    """Run on each of two ranks; rank 0 writes what it saw to ``folder/seen.pt``."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    made = rig.backend(model, rank=rank, world_size=2, max_grad_norm=0.5, micro_batch_tokens=30,
                       gradient_checkpointing=True)  # fmt: skip
    uneven = slice(0, 9) if rank == 0 else slice(9, 12)
    seen: dict[str, object] = {}
    forward = made.forward(rig.batch()[uneven], ["log_probs", "entropy"], temperature=0.8)
    seen["forward"] = forward
    alone = slice(0, 12) if rank == 0 else slice(12, 12)  # one rank without any row
    seen["forward_alone"] = made.forward(rig.batch()[alone], ["log_probs", "entropy"], temperature=0.8)
    seen["updates"] = [
        update(made, uneven),
        update(made, alone, 0.5),
        update(made, slice(0, 1) if rank == 0 else slice(1, 12)),  # one rank with nothing to learn
    ]
    seen["weights"] = whole_weights(made)
    try:
        made.live_module()
    except RunError as error:
        seen["live"] = str(error)
    (folder / "state").mkdir(exist_ok=True)
    made.save(folder / "state")
    made.export(folder / "export")
    broken = rig.batch()
    if rank == 1:
        broken = broken.with_columns(advantages=torch.full_like(broken.batch["advantages"], torch.inf))
    try:
        update(made, uneven, data=broken)
    except NonFiniteError:
        seen["refused"] = True
    unchanged = whole_weights(made)
    seen["unchanged"] = all(unchanged[name].equal(tensor) for name, tensor in seen["weights"].items())
    seen["next"] = update(made, uneven)
    made.load(folder / "state")
    seen["again"] = update(made, uneven)
    made.load(checkpoint)  # written by one process
    seen["from_one"] = update(made, uneven)
    torch.save(seen, folder / f"seen-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def critic_work(rank: int, model: Path, folder: Path, checkpoint: Path) -> None:
    """As :func:`work`, for a critic."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    made = rig.critic(model, rank=rank, world_size=2, max_grad_norm=0.5, micro_batch_tokens=30,
                      optimizer={"eps": 1e-3})  # fmt: skip
    whole = rig.critic_batch()

    def take(rows: slice) -> dict[str, float]:
        metrics = made.update(whole[rows], rig.VALUE_TERMS, rig.counts(whole), temperature=1.0, lr_factor=1.0)
        return {name: metrics[name].result() for name in ("loss", "grad_norm", "lr")}

    uneven = slice(0, 9) if rank == 0 else slice(9, 12)
    seen: dict[str, object] = {"values": made.forward(rig.batch()[uneven], ["values"], temperature=1.0)["values"]}
    alone = slice(0, 12) if rank == 0 else slice(12, 12)  # one rank without any row
    seen["updates"] = [take(uneven), take(alone), take(slice(0, 1) if rank == 0 else slice(1, 12))]
    seen["weights"] = whole_weights(made)
    (folder / "state").mkdir(exist_ok=True)
    made.save(folder / "state")
    made.export(folder / "export")
    seen["next"] = take(uneven)
    made.load(folder / "state")
    seen["again"] = take(uneven)
    made.load(checkpoint)  # written by one process
    seen["from_one"] = take(uneven)
    torch.save(seen, folder / f"seen-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def lora_work(rank: int, model: Path, folder: Path, checkpoint: Path) -> None:
    """As :func:`work`, for an adapter."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    options = {"rank": rank, "world_size": 2, "max_grad_norm": 0.5, "micro_batch_tokens": 30}
    made = rig.adapted(model, gradient_checkpointing=True, **options)
    uneven = slice(0, 9) if rank == 0 else slice(9, 12)
    alone = slice(0, 12) if rank == 0 else slice(12, 12)  # one rank without any row
    seen: dict[str, object] = {}

    def reference() -> torch.Tensor:
        return made.reference_forward(rig.batch()[uneven], ["log_probs"], temperature=0.8)["log_probs"]

    seen["reference_first"] = reference()
    seen["forward"] = made.forward(rig.batch()[uneven], ["log_probs", "entropy"], temperature=0.8)
    seen["sharded"] = sum(
        p.to_local().numel() < p.numel() for name, p in made.model.named_parameters() if ".lora_" in name
    )
    seen["updates"] = [
        update(made, uneven),
        update(made, alone, 0.5),
        update(made, slice(0, 1) if rank == 0 else slice(1, 12)),  # one rank with nothing to learn
    ]
    seen["weights"] = whole_weights(made)
    seen["shards"] = shards(made)
    seen["reference_last"] = reference()
    (folder / "state").mkdir(exist_ok=True)
    made.save(folder / "state")
    made.export(folder / "export")
    lora.export(made.model, made.context.model, folder / "adapter", rank=rank)
    seen["next"] = update(made, uneven)
    made.load(folder / "state")
    seen["again"] = update(made, uneven)
    made.load(checkpoint)  # written by one process
    seen["from_one"] = update(made, uneven)
    other = rig.backend(model, lora={"rank": 4, "alpha": 6}, model={"dtype": "bfloat16"}, **options)
    seen["bfloat16"] = update(other, uneven)
    if rank == 0:
        try:
            other.load(folder / "state")
        except CheckpointError as error:
            seen["refused"] = str(error)
    torch.save(seen, folder / f"seen-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
