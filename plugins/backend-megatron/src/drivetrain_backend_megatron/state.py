"""Checkpoints: what each rank holds as safetensors, and a JSON file that says how ranks are parallel.

A folder holds, for each rank, ``rank-0.safetensors`` and ``rank-0.json``. Ranks that are parallel in the same way read
it back; others start from an export. Nothing is pickled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from drivetrain import CheckpointError, Hardware, NonFiniteError, RankLayout
from drivetrain_backend_megatron.optimizer import Optimizer


def save(
    folder: Path, model: Mapping[str, Tensor], optimizer: Optimizer | None, hardware: Hardware, *, rank: int,
    layout: RankLayout, options: Mapping[str, Any],
) -> None:  # fmt: skip
    """Write this rank's part of the state.

    Args:
        model: this rank's parameters.
        options: what else has to be equal where the state is read.

    Raises:
        drivetrain.NonFiniteError: a weight or a moment is NaN or infinite.
    """
    tensors = {}
    for name, tensor in _tensors(model, optimizer):
        if not tensor.isfinite().all():
            raise NonFiniteError(f"{name} is not finite, so the model is not saved", where="checkpoint",
                                 mend="go on from an earlier checkpoint with a lower learning rate")  # fmt: skip
        tensors[name] = tensor.detach().to("cpu", copy=True).contiguous()
    tensors |= {f"rng.{name}": tensor.cpu() for name, tensor in hardware.rng_state().items()}
    save_file(tensors, folder / f"rank-{rank}.safetensors")
    about = {"layout": asdict(layout), "options": dict(options)}
    (folder / f"rank-{rank}.json").write_text(json.dumps(about))


@torch.no_grad()
def load(
    folder: Path, model: Mapping[str, Tensor], optimizer: Optimizer | None, hardware: Hardware, *, rank: int,
    layout: RankLayout, options: Mapping[str, Any],
) -> None:  # fmt: skip
    """Read this rank's part into its parameters and its optimizer, and put back its random state.

    Raises:
        drivetrain.CheckpointError: files or tensors are missing or have other shapes, or ranks were parallel in another
            way.
    """
    weights, about = folder / f"rank-{rank}.safetensors", folder / f"rank-{rank}.json"
    if not weights.is_file() or not about.is_file():
        raise CheckpointError(f"{folder} holds no state of backend megatron for rank {rank}",
                              mend="resume from another checkpoint, with as many ranks as wrote it")  # fmt: skip
    wrote, reads = json.loads(about.read_text()), {"layout": asdict(layout), "options": dict(options)}
    if wrote != reads:
        raise CheckpointError(f"rank {rank} wrote the checkpoint as {wrote}, and reads it as {reads}",
                              where=str(folder), mend="resume with the sizes that it was saved with, or start a run"
                              " from an export of it")  # fmt: skip
    with safe_open(weights, framework="pt") as file:
        stored = set(file.keys())
        for name, tensor in _parameters(model, optimizer):
            if name not in stored or file.get_slice(name).get_shape() != list(tensor.shape):
                raise CheckpointError(f"the checkpoint holds no {name!r} of the shape {list(tensor.shape)}",
                                      where=str(folder), mend="resume with the model that was saved")  # fmt: skip
            tensor.copy_(file.get_tensor(name))
        for name, parameter, moments in _held(optimizer):
            for key in stored:
                if key.startswith(f"{name}."):
                    value = file.get_tensor(key)
                    if value.dim():  # memory of its own: on a CPU it is the mapped file, which cannot be freed
                        value = value.to(parameter.device, copy=True)
                    moments[key.removeprefix(f"{name}.")] = value
        hardware.set_rng_state({name[4:]: file.get_tensor(name) for name in stored if name.startswith("rng.")})


def _tensors(model: Mapping[str, Tensor], optimizer: Optimizer | None) -> Iterator[tuple[str, Tensor]]:
    yield from _parameters(model, optimizer)
    for name, _, moments in _held(optimizer):
        for key, value in moments.items():
            yield f"{name}.{key}", value


def _parameters(model: Mapping[str, Tensor], optimizer: Optimizer | None) -> Iterator[tuple[str, Tensor]]:
    """The model's parameters, and those that the optimizer holds copies or shares of."""
    own = {id(tensor) for tensor in model.values()}
    yield from ((f"model.{name}", tensor) for name, tensor in model.items())
    for name, parameter, _ in _held(optimizer):
        if id(parameter) not in own:
            yield f"{name.replace('moments', 'parameters', 1)}", parameter


def _held(optimizer: Optimizer | None) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
    return iter(()) if optimizer is None else optimizer.held()
