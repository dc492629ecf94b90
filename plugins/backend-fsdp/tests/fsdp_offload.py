"""What a backend holds, and what two processes do in test_fsdp_offload_ranks."""

from __future__ import annotations

from pathlib import Path

import fsdp_ranks
import fsdp_rig as rig
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from drivetrain import RunError
from drivetrain_backend_fsdp.backend import FSDPBackend


def tensors(made: FSDPBackend) -> list[Tensor]:
    """Parameters and moments; this rank's shards."""
    states = [] if made.optimizer is None else made.optimizer.state.values()
    moments = [value for state in states for value in state.values() if value.dim()]
    found = [tensor.detach() for tensor in (*made.model.parameters(), *moments)]
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in found]


def snapshot(made: FSDPBackend) -> list[Tensor]:
    """Copies of :func:`tensors`."""
    return [tensor.clone() for tensor in tensors(made)]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    """Whether all are equal bit for bit."""
    return len(one) == len(other) and all(
        a.dtype == b.dtype and a.contiguous().view(torch.uint8).equal(b.contiguous().view(torch.uint8))
        for a, b in zip(one, other, strict=True)
    )


PARTS = ("parameters", "optimizer")


def work(rank: int, model: Path, folder: Path) -> None:
    """Run on each of two ranks; writes what it saw to ``folder/seen-RANK.pt``."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    options = {"rank": rank, "world_size": 2, "max_grad_norm": 0.5, "micro_batch_tokens": 30}
    plain = rig.backend(model, **options)
    moves = rig.backend(model, **options, param_offload=True, optimizer_offload=True)
    within = rig.backend(model, **options, grad_offload=True, activation_offload=True, gradient_checkpointing=True)
    host = rig.backend(model, **options, cpu_offload=True, activation_offload=True)
    rows = slice(0, 9) if rank == 0 else slice(9, 12)
    alone = slice(0, 12) if rank == 0 else slice(12, 12)  # one rank without any row
    seen: dict[str, object] = {"updates": {}, "exact": {}}
    expected = [fsdp_ranks.update(plain, chosen) for chosen in (rows, alone, rows)]
    for name, made in {"moves": moves, "within": within, "host": host}.items():
        found = []
        for chosen in (rows, alone, rows):
            if name == "moves":
                objects, before = list(made.model.parameters()), snapshot(made)
                made.offload(PARTS)
                seen["freed"] = [tensor.untyped_storage().nbytes() for tensor in tensors(made)]
                try:
                    fsdp_ranks.update(made, chosen)
                except RunError as error:
                    seen["refused"] = str(error)
                made.onload(PARTS)
                seen["exact"]["round_trip"] = same(snapshot(made), before)
                seen["exact"]["objects"] = all(map(lambda a, b: a is b, objects, made.model.parameters()))
            found.append(fsdp_ranks.update(made, chosen))
        seen["updates"][name] = found == expected if name != "host" else (found, expected)
        if name != "host":
            seen["exact"][name] = same(snapshot(made), snapshot(plain))
    seen["weights"] = [fsdp_ranks.whole_weights(made) for made in (plain, host)]
    (folder / "state").mkdir(exist_ok=True)
    host.save(folder / "state")
    host.export(folder / "export")
    seen["next"] = fsdp_ranks.update(host, rows)
    host.load(folder / "state")
    seen["again"] = fsdp_ranks.update(host, rows)
    judge = rig.critic(model, rank=rank, world_size=2)
    values = judge.forward(rig.batch()[rows], ["values"], temperature=1.0)["values"]
    judge.offload(["parameters"])
    judge.onload(["parameters"])
    seen["exact"]["values"] = judge.forward(rig.batch()[rows], ["values"], temperature=1.0)["values"].equal(values)
    torch.save(seen, folder / f"seen-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
