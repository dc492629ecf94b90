"""The way of a low-rank adapter into vLLM, which reads adapters from folders as peft writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from drivetrain import WeightStreamError
from drivetrain.weights import WeightStream

SIZES = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks for which vLLM makes room; an adapter of a lower one is filled up with zeros."""

NAME, NUMBER = "policy", 1
"""Of the one adapter."""

A, B = ".lora_A.weight", ".lora_B.weight"


def room(rank: int) -> int:
    """The rank for which vLLM has to make room."""
    return next(size for size in SIZES if size >= rank)


def received(stream: WeightStream, rank: int) -> dict[str, Tensor]:
    """An adapter's tensors on the host.

    Raises:
        WeightStreamError: for weights of the model, a shard, or what is missing, doubled or of another rank.
    """
    held: dict[str, Tensor] = {}
    for bucket in stream:
        if bucket.kind != "adapter":
            raise WeightStreamError(f"rollout 'vllm' with adapter_rank takes an adapter; a bucket of kind "
                                    f"{bucket.kind!r} was sent")  # fmt: skip
        for entry in bucket.entries:
            if entry.placement.count > 1:
                raise WeightStreamError(f"{entry.name!r} was sent as a shard; rollout 'vllm' takes whole tensors")
            if entry.name in held:
                raise WeightStreamError(f"{entry.name!r} was sent twice")
            held[entry.name] = entry.tensor.detach().to("cpu", copy=True)
    for name, tensor in held.items():
        _check(name, tensor, rank, held)
    if not held:
        raise WeightStreamError("an adapter without a layer was sent")
    return held


def _check(name: str, tensor: Tensor, rank: int, held: dict[str, Tensor]) -> None:
    own, other, dim = (A, B, 0) if name.endswith(A) else (B, A, 1)
    if not name.endswith(own) or tensor.dim() != 2:
        raise WeightStreamError(f"{name!r} of shape {tuple(tensor.shape)} is no part of an adapter")
    if name.removesuffix(own) + other not in held:
        raise WeightStreamError(f"{name!r} was sent without its {other[1:7]}")
    if tensor.shape[dim] != rank:
        raise WeightStreamError(f"{name!r} is of rank {tensor.shape[dim]}; rollout.adapter_rank is {rank}")


def write(tensors: dict[str, Tensor], rank: int, folder: Path) -> None:
    """Write what vLLM reads. The scale, alpha / rank, is 1: it is in B already."""
    layers = {name.removesuffix(A).rpartition(".")[2] for name in tensors if name.endswith(A)}
    about = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": sorted(layers), "bias": "none"}
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(about))


def request(folder: Path, *, load: bool = False) -> Any:
    """What tells vLLM of the adapter: to ``load`` it, in place of the one that it had, or to compute with it."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(NAME, NUMBER, str(folder), load_inplace=load)
