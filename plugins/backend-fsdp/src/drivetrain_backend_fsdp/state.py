"""Checkpoints: each rank's shards as safetensors, and a JSON file that says which rows of which tensor they are.

A folder holds, for each rank, ``rank-0.json``, ``rank-0.safetensors`` and, where its part is large,
``rank-0-1.safetensors`` and so on. Any number of ranks can read what any other number wrote, for a rank reads the rows
it needs from whatever files hold them. Nothing is pickled.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from drivetrain import CheckpointError
from drivetrain_backend_common import copies, tensor_files
from drivetrain_backend_fsdp import lora
from drivetrain_backend_fsdp.sharding import first_holder, local, rows_like


def collect(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    rng: dict[str, Tensor],
    rank: int,
    world: int,
    copy: copies.Copy,
) -> Callable[[Path], None]:
    """This rank's part of the state; returns what writes it to a folder, which exists.

    Raises:
        drivetrain.NonFiniteError: a weight or a moment is NaN or infinite.
    """
    tensors = {f"rng.{name}": copy(f"rng.{name}", tensor) for name, tensor in rng.items()}  # they go to the first file
    found: dict[str, Tensor] = {}
    layout: dict[str, Any] = {"world_size": world, "tensors": {}, "numbers": {}}
    if not rank:
        layout["adapter"] = lora.identity(model)
    for name, tensor in _tensors(model, optimizer):
        if not isinstance(tensor, Tensor):
            layout["numbers"][name] = tensor
            continue
        part, start = local(tensor)
        found[name] = copies.finite(part)
        if not first_holder(tensor, rank):
            continue
        tensors[name] = copy(name, part)
        layout["tensors"][name] = {"start": start, "shape": list(tensor.shape), "on_host": tensor.device.type == "cpu"}
    copies.check_finite(found)

    def describe(files: Mapping[str, str]) -> dict[str, Any]:
        for name, entry in layout["tensors"].items():
            entry["file"] = files[name]
        return layout

    return partial(tensor_files.write_rank, tensors, describe, rank)


def load(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    set_rng: Callable[[dict[str, Tensor]], None],
    rank: int,
    world: int,
) -> None:
    """Read this rank's part into the model and the optimizer.

    The random state is put back if as many ranks wrote as now read.

    Raises:
        drivetrain.CheckpointError: when files or tensors are missing or have other shapes.
    """
    reader = _Reader(folder)
    if not rank:
        lora.check_identity(model, reader.adapter, folder)
    for name, tensor in _model_tensors(model):
        reader.read(name, tensor)
    if optimizer is not None:
        names = _names(model)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = reader.entries(f"optimizer.{names[parameter]}.")
                fused = bool(group.get("fused"))
                optimizer.state[parameter] = {key: reader.value(name, parameter, fused) for key, name in state.items()}
    if reader.world_size == world:
        set_rng(reader.rng(rank))


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[tuple[str, Any]]:
    yield from _model_tensors(model)
    if optimizer is not None:
        names = _names(model)
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                yield f"optimizer.{names[parameter]}.{key}", value


def _model_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, tied ones once, and the buffers that belong to a checkpoint; with an adapter, only what learns."""
    kept = set(model.state_dict())
    adapted = bool(lora.layers(model))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in kept and (tensor.requires_grad or not adapted):
            yield f"model.{name}", tensor


def _names(model: nn.Module) -> dict[Tensor, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


class _Reader:
    """The files of all ranks, as one set of tensors."""

    def __init__(self, folder: Path) -> None:
        layouts = sorted(folder.glob("rank-*.json"))
        if not layouts:
            raise CheckpointError(f"{folder} holds no state of backend fsdp", mend="resume from another checkpoint")
        self._folder = folder
        self._files: list[Any] = []
        self._parts: dict[str, list[tuple[int, Any]]] = {}
        self._layout: dict[str, dict[str, Any]] = {}
        self._numbers: dict[str, Any] = {}
        self.adapter: dict[str, Any] | None = None
        for path in layouts:
            layout = json.loads(path.read_text())
            self.world_size = int(layout["world_size"])
            names = {f"{path.stem}.safetensors", *(entry["file"] for entry in layout["tensors"].values())}
            if len(layouts) != self.world_size or not all((folder / name).is_file() for name in names):
                raise CheckpointError(f"{folder} is not complete: {self.world_size} ranks wrote it",
                                      mend="resume from another checkpoint")  # fmt: skip
            files = {name: safe_open(folder / name, framework="pt").__enter__() for name in names}
            for name, entry in layout["tensors"].items():
                self._parts.setdefault(name, []).append((entry["start"], files[entry["file"]]))
                self._layout[name] = entry
            self._numbers |= layout["numbers"]
            self.adapter = layout.get("adapter") or self.adapter

    def entries(self, prefix: str) -> dict[str, str]:
        """Names that start with the prefix, by what follows it."""
        return {name[len(prefix) :]: name for name in (*self._layout, *self._numbers) if name.startswith(prefix)}

    @torch.no_grad()
    def read(self, name: str, into: Tensor) -> None:
        """Fill this rank's part of a tensor."""
        if name not in self._layout or self._layout[name]["shape"] != list(into.shape):
            shape = self._layout.get(name, {}).get("shape", "nothing")
            raise CheckpointError(f"the checkpoint holds {shape} for {name!r}; the model has {list(into.shape)}",
                                  where=str(self._folder), mend="resume with the model that was saved")  # fmt: skip
        part, start = local(into)
        if not part.dim():
            part.copy_(self._parts[name][0][1].get_tensor(name))
            return
        for other, file in self._parts[name]:
            stored = file.get_slice(name)
            low, high = max(start, other), min(start + len(part), other + stored.get_shape()[0])
            if low < high:
                part[low - start : high - start].copy_(stored[low - other : high - other])

    def value(self, name: str, parameter: nn.Parameter, fused: bool) -> Any:
        """A value of the optimizer's state: a number, or a tensor.

        A tensor with as many rows as the parameter is distributed as the parameter is. Other tensors lie where they
        lay when they were saved; a fused kernel wants them on its device.
        """
        if name in self._numbers:
            return self._numbers[name]
        entry, file = self._layout[name], self._parts[name][0][1]
        if entry["shape"][:1] == list(parameter.shape[:1]):
            value = rows_like(parameter, entry["shape"], _DTYPES[file.get_slice(name).get_dtype()])
            self.read(name, value)
            return value
        return file.get_tensor(name).to("cpu" if entry["on_host"] and not fused else parameter.device)

    def rng(self, rank: int) -> dict[str, Tensor]:
        """The random state of a rank."""
        with safe_open(self._folder / f"rank-{rank}.safetensors", framework="pt") as file:
            return {name[4:]: file.get_tensor(name) for name in file.keys() if name.startswith("rng.")}


_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip
