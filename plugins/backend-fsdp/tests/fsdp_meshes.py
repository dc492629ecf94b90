"""What the processes of test_fsdp_sharding and test_fsdp_loading do."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import fsdp_judges as judges
import fsdp_ranks
import fsdp_rig as rig
import pytest
import torch
import torch.distributed as dist

from drivetrain import DataProto, UserError
from drivetrain_backend_fsdp import loading, sharding

MODES: dict[str, dict[str, Any]] = {
    "full": {},
    "hybrid": {"shard_size": 2, "gradient_checkpointing": True},
    "replicas": {"shard_size": 1},
    "kept": {"reshard_after_forward": False},
}
STEP = {"max_grad_norm": 0.5, "optimizer": {"eps": 1e-3}}


def start(rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)


def finish(seen: Any, rank: int, folder: Path) -> None:
    torch.save(seen, folder / f"seen-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def share(rank: int, world: int) -> slice:
    """Uneven parts of twelve rows; the last rank of four has one row."""
    ends = {2: (0, 9, 12), 4: (0, 5, 8, 11, 12)}[world]
    return slice(ends[rank], ends[rank + 1])


def gradients(made: Any, rows: slice, data: DataProto) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and whole gradients, clipped, of an update that changes nothing; each rank has its rows."""
    optimizer, recorder = made.optimizer, rig.Recorder(made)
    metrics = made.update(data[rows], rig.TERMS, rig.counts(data), temperature=1.0, lr_factor=1.0)
    made.optimizer = optimizer
    return metrics["loss"].result(), {name: sharding.whole(grad) for name, grad in recorder.gradients.items()}


def sharded(rank: int, model: Path, llama: Path, folder: Path) -> None:
    """Run on each of four ranks."""
    start(rank, 4, folder)
    rows, seen = share(rank, 4), {}
    for mode, options in MODES.items():
        made = rig.backend(model, rank=rank, world_size=4, micro_batch_tokens=30, **STEP, **options)
        seen[mode] = {
            "mesh": tuple(next(made.model.parameters()).device_mesh.shape),
            "gradients": gradients(made, rows, rig.batch()),
            "forward": made.forward(rig.batch()[rows], ["log_probs", "entropy"], temperature=0.8),
            "local": sum(sharding.local(p)[0].numel() for p in made.model.parameters()),
            "updates": [fsdp_ranks.update(made, rows), fsdp_ranks.update(made, rows, 0.5)],
            "weights": fsdp_ranks.whole_weights(made),
            "shards": fsdp_ranks.shards(made),
            "state": made.memory()["parameters"],
        }
        if mode == "full":
            (folder / "state-of-four").mkdir(exist_ok=True)
            made.save(folder / "state-of-four")
        if mode == "hybrid":
            (folder / "state").mkdir(exist_ok=True)
            write = made.snapshot()
            made.export(folder / "export")
            seen["next"] = fsdp_ranks.update(made, rows)
            write(folder / "state")  # what the update has not touched
            dist.barrier()
            made.load(folder / "state")
            seen["again"] = fsdp_ranks.update(made, rows)
    seen["bfloat16"] = bfloat16(rank, model, rows)

    critic = rig.critic(model, rank=rank, world_size=4, micro_batch_tokens=30, shard_size=2, **STEP)
    data = rig.critic_batch()
    metrics = critic.update(data[rows], rig.VALUE_TERMS, rig.counts(data), temperature=1.0, lr_factor=1.0)
    seen["critic"] = {name: metrics[name].result() for name in ("loss", "grad_norm")}
    seen["values"] = critic.forward(rig.batch()[rows], ["values"], temperature=1.0)["values"]
    judge = judges.worker(llama, rank=rank, world_size=4, backend={"shard_size": 2, "reshard_after_forward": False})
    seen["scores"] = judge.compute_rm_score(judges.batch())["rm_scores"]
    with pytest.raises(UserError, match="4 ranks do not make up groups of 3") as raised:
        rig.backend(model, rank=rank, world_size=4, shard_size=3)
    assert "shard_size" in str(raised.value.where)
    finish(seen, rank, folder)


def bfloat16(rank: int, model: Path, rows: slice) -> dict[str, Any]:
    """Gradients, log-probs and the types that a layer and an optimizer see."""
    made = rig.backend(model, rank=rank, world_size=4, micro_batch_tokens=30, shard_size=2, compute_dtype="bfloat16",
                       max_grad_norm=None)  # fmt: skip
    dtypes = []
    layer = made.model.model.layers[0].mlp
    layer.register_forward_pre_hook(
        lambda module, inputs: dtypes.append((module.up_proj.weight.dtype, inputs[0].dtype))
    )
    computed = made.forward(rig.batch()[rows], ["log_probs", "entropy"], temperature=1.0)
    return {
        "dtypes": set(dtypes),
        "outputs": {output.dtype for output in computed.values()},
        "log_probs": computed["log_probs"],
        "masters": {parameter.dtype for parameter in made.model.parameters()},
        "gradients": gradients(made, rows, rig.batch())[1],
    }


def resumed(rank: int, model: Path, folder: Path, *checkpoints: Path) -> None:
    """Go on, on each of two ranks, from what four ranks wrote."""
    start(rank, 2, folder)
    made = rig.backend(model, rank=rank, world_size=2, micro_batch_tokens=30, **STEP)
    seen = []
    for checkpoint in checkpoints:
        made.load(checkpoint)
        seen.append(fsdp_ranks.update(made, share(rank, 2)))
    finish(seen, rank, folder)


class Counting:
    """safe_open, and how many bytes were read through it."""

    read = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.file = SAFE_OPEN(*args, **kwargs)

    def __enter__(self) -> Counting:
        return self

    def keys(self) -> Any:
        return self.file.keys()

    def get_slice(self, name: str) -> Any:
        return CountingSlice(self.file.get_slice(name))


class CountingSlice:
    def __init__(self, part: Any) -> None:
        self.part, self.get_shape = part, part.get_shape

    def __getitem__(self, index: Any) -> torch.Tensor:
        tensor = self.part[index]
        Counting.read += tensor.nbytes
        return tensor


SAFE_OPEN = loading.safe_open


def loaded(rank: int, cases: list[tuple[str, Path, dict[str, Any]]], folder: Path) -> None:
    """Load each folder on each of two ranks; keep whole weights, buffers, and the bytes of shards and of reads."""
    start(rank, 2, folder)
    loading.safe_open = Counting
    seen: dict[str, Any] = {}
    for name, path, options in cases:
        Counting.read = 0
        try:
            made = rig.backend(path, rank=rank, world_size=2, **options)
        except UserError as error:
            seen[name] = str(error)
            continue
        parts = [sharding.local(p)[0] for p in made.model.parameters()]
        seen[name] = {
            "read": Counting.read,
            "held": sum(part.nbytes for part in parts),
            "weights": {n: sharding.whole(p) for n, p in made.model.named_parameters()},
            "buffers": dict(made.model.named_buffers()),
            "sent": fsdp_ranks.whole_weights(made),
            "shards": fsdp_ranks.shards(made),
        }
    finish(seen, rank, folder)


def alone(path: Path, options: dict[str, Any]) -> dict[str, Any]:
    """What one process loads."""
    made = rig.backend(path, **options)
    return {
        "weights": dict(made.model.named_parameters()),
        "buffers": dict(made.model.named_buffers()),
        "sent": fsdp_ranks.whole_weights(made),
    }


def copy(path: Path, to: Path) -> Path:
    """A folder without its weights."""
    shutil.copytree(path, to, ignore=shutil.ignore_patterns("*.safetensors*"))
    return to
