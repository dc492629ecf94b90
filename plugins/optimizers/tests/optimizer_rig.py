"""Parameters with weights and gradients to train on, whole or sharded, and a small model in the backend ``fsdp``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from drivetrain import BackendContext, DataProto, LossTerm, resolve
from drivetrain.config import ModelConfig, PluginConfig
from drivetrain.numerics import Counts
from drivetrain_optimizers.adamw_8bit import AdamW8bit, adamw_8bit
from drivetrain_optimizers.configs import AdamW8bitConfig

#: the last three are not quantised in blocks of 64
SHAPES = {
    "even": (64, 64),
    "uneven": (33, 128),
    "experts": (3, 32, 64),
    "odd": (100, 50),
    "small": (8, 64),
    "norm": (64,),
}
QUANTISED = ("even", "uneven", "experts")
CONFIG = AdamW8bitConfig(lr=0.02, betas=(0.8, 0.9), weight_decay=0.1, block_size=64)


def drawn(name: str, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A weight (seed 0) or the gradient of a step, of many orders of magnitude."""
    generator = torch.Generator().manual_seed(100 * seed + list(SHAPES).index(name))
    values = torch.randn(SHAPES[name], generator=generator)
    sizes = 10 ** (-3 * torch.rand(SHAPES[name], generator=generator)) if seed else torch.ones(SHAPES[name])
    return (values * sizes).to(dtype)


def whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def train(
    mesh: DeviceMesh | None = None, *, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[dict[str, nn.Parameter], AdamW8bit]:
    """Train for three steps."""

    def place(tensor: Tensor) -> Tensor:
        return tensor.to(device) if mesh is None else distribute_tensor(tensor, mesh, [Shard(0)])

    parameters = {name: nn.Parameter(place(drawn(name, 0, dtype))) for name in SHAPES}
    optimizer = adamw_8bit(parameters.items(), CONFIG)
    for step in range(1, 4):
        for name, parameter in parameters.items():
            parameter.grad = place(drawn(name, step, dtype))
        optimizer.step()
    return parameters, optimizer


def outcome(*args: Any, **options: Any) -> dict[str, Tensor]:
    """Whole weights and moments after :func:`train`."""
    parameters, optimizer = train(*args, **options)
    seen = {name: whole(parameter) for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        seen |= {f"{name}.{key}": whole(value) for key, value in optimizer.state[parameter].items()}
    return seen


def write_model(folder: Path) -> Path:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(3)
    Qwen2ForCausalLM(Qwen2Config(
        vocab_size=65, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.15, tie_word_embeddings=True,
    )).save_pretrained(folder)  # fmt: skip
    return folder


def backend(folder: Path, *, rank: int = 0, world_size: int = 1, lr: float = 3e-3) -> Any:
    """A critic in the backend ``fsdp`` that is ready to work."""
    from drivetrain_backend_fsdp.config import FSDPConfig

    context = BackendContext(
        role="critic", model=ModelConfig(path=folder), optimizer=AdamW8bitConfig(lr=lr, block_size=64),
        max_grad_norm=1.0, hardware=resolve("hardware", "cpu")(PluginConfig(name="cpu")), rank=rank,
        world_size=world_size, seed=5,
    )  # fmt: skip
    made = resolve("backends", "fsdp")(FSDPConfig(), context)
    made.initialize()
    return made


def step(made: Any, rows: slice = slice(None)) -> dict[str, float]:
    """An update towards the same returns each time."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(3, 60, (6, 8), generator=generator)
    mask = torch.ones(6, 5, dtype=torch.long)
    data = DataProto.from_single_dict(
        {"input_ids": ids, "attention_mask": torch.ones_like(ids), "responses": ids[:, 3:], "response_mask": mask,
         "values": torch.zeros(6, 5), "returns": torch.randn(6, 5, generator=generator)}
    )  # fmt: skip
    terms = [LossTerm(name="value_clip", args={"clip_range": 100.0})]
    metrics = made.update(data[rows], terms, Counts.of(mask, None), temperature=1.0, lr_factor=1.0)
    return {name: metrics[name].result() for name in ("loss", "grad_norm")}


def work(rank: int, model: Path, folder: Path, checkpoint: Path) -> None:
    """What each of two ranks does; it writes what it saw to ``folder/seen-<rank>.pt``."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    seen: dict[str, Any] = {"trained": outcome(init_device_mesh("cpu", (2,)))}
    mine = slice(0, 4) if rank == 0 else slice(4, 6)
    made = backend(model, rank=rank, world_size=2)
    seen["updates"] = [step(made, mine), step(made, mine)]
    (folder / "state").mkdir(exist_ok=True)
    made.save(folder / "state")
    seen["next"] = [step(made, mine), step(made, mine)]
    made.load(folder / "state")
    seen["again"] = [step(made, mine), step(made, mine)]
    made.load(checkpoint)  # written by one process
    seen["from_one"] = [step(made, mine), step(made, mine)]
    torch.save(seen, folder / f"seen-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
