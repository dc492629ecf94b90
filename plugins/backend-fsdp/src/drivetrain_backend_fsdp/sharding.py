"""Sharding over ranks with FSDP2, and what it takes to sum gradients in place of averaging them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from drivetrain import UserError
from drivetrain.weights import Placement


def shard(
    model: nn.Module,
    layers: Iterable[nn.Module],
    *,
    device_type: str,
    world_size: int,
    shard_size: int | None = None,
    reshard_after_forward: bool = True,
    compute_dtype: torch.dtype | None = None,
    on_host: bool = False,
) -> None:
    """Shard each layer, and the rest with the root, over groups of ``shard_size`` ranks (None: one group of all).

    Moves them to the device, unless they are on the meta device. Each group holds the whole model. Gradients are
    summed over all ranks, in float32. With ``compute_dtype`` parameters are gathered, and computed with, in that type.

    Args:
        on_host: keep shards and their gradients in host memory, and copy a layer's to the device when it is gathered.

    Raises:
        drivetrain.UserError: when ranks do not make up whole groups, or the model's family keeps some of the weights
            that learn in another type than the rest, which FSDP2 does not reduce together.
    """
    dtypes = {str(parameter.dtype) for parameter in model.parameters() if parameter.requires_grad}
    if len(dtypes) > 1:
        raise UserError(f"{type(model).__name__} has weights in {' and '.join(sorted(dtypes))}, which cannot be sharded"
                        " together", where="model.dtype",
                        mend="set it to float32, with backend.compute_dtype=bfloat16 for speed")  # fmt: skip
    size = world_size if shard_size is None else shard_size
    if world_size % size:
        raise UserError(f"{world_size} ranks do not make up groups of {size}", where="backend.shard_size",
                        mend="set it to a divisor of the number of processes")  # fmt: skip
    if size == world_size:
        mesh = init_device_mesh(device_type, (world_size,), mesh_dim_names=("dp",))
    else:
        mesh = init_device_mesh(device_type, (world_size // size, size), mesh_dim_names=("replicate", "shard"))
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    placing = CPUOffloadPolicy(pin_memory=device_type != "cpu") if on_host else OffloadPolicy()
    again = None if reshard_after_forward else False  # None: the root's own, which the backward pass needs first, stay
    for layer in [*layers, model]:
        fully_shard(layer, mesh=mesh, mp_policy=policy, offload_policy=placing, reshard_after_forward=again)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot divide on the way
    if hasattr(model, "packed_forward"):
        register_fsdp_forward_method(model, "packed_forward")


def release(model: nn.Module) -> None:
    """Free what a forward pass left gathered, so that parameters are their shards again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def whole(tensor: Tensor) -> Tensor:
    """The full tensor, gathered from all ranks if it is sharded (then a collective call)."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    if on_host(tensor):
        tensor = cast(DTensor, tensor.to(tensor.device_mesh.device_type))
    return tensor.full_tensor()


def copies(tensor: Tensor) -> int:
    """How many ranks hold the same part of a tensor."""
    if not isinstance(tensor, DTensor):
        return 1
    mesh = tensor.device_mesh
    return math.prod(mesh.size(dim) for dim, placed in enumerate(tensor.placements) if placed.is_replicate())


def on_host(tensor: Tensor) -> bool:
    """Whether a sharded tensor's parts are in host memory, while ranks talk between devices."""
    return isinstance(tensor, DTensor) and tensor.device.type != tensor.device_mesh.device_type


def local(tensor: Tensor) -> tuple[Tensor, int]:
    """This rank's part of a tensor that is split on its first dimension, and the row at which the part starts."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor, 0
    part = placement(tensor)
    start = 0 if part is None else min(-(-tensor.shape[0] // part.count) * part.index, tensor.shape[0])
    return tensor.to_local(), start


def placement(tensor: Tensor) -> Placement | None:
    """Where this rank's rows are in a sharded tensor; None where it holds all of it."""
    if isinstance(tensor, DTensor):
        for dim, placed in enumerate(tensor.placements):
            if placed.is_shard(0):
                mesh = tensor.device_mesh
                return Placement(dim=0, index=mesh.get_local_rank(dim), count=mesh.size(dim))
    return None


def first_holder(tensor: Tensor, rank: int) -> bool:
    """Whether this rank is the first of those that hold the same part of a tensor as it does."""
    if not isinstance(tensor, DTensor):
        return not rank
    mesh = tensor.device_mesh
    return not any(
        mesh.get_local_rank(dim) for dim, placement in enumerate(tensor.placements) if placement.is_replicate()
    )


def rows_like(parameter: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An empty tensor with as many rows as a parameter, distributed over ranks as the parameter is."""
    if list(shape) == list(parameter.shape):
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    if not isinstance(parameter, DTensor):
        return torch.empty(shape, dtype=dtype, device=parameter.device)
    part = torch.empty(len(parameter.to_local()), *shape[1:], dtype=dtype, device=parameter.device)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(part, parameter.device_mesh, parameter.placements, run_check=False,
                              shape=torch.Size(shape), stride=stride).to(parameter.device)  # fmt: skip


def alike(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """The tensors, by how they are distributed: one kernel takes plain or sharded ones, of one mesh, not a mixture."""
    groups: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        kind = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
        groups.setdefault(kind, []).append(tensor)
    return list(groups.values())


def reduce(value: Any, device: torch.device, *, largest: bool = False) -> float:
    """Sum (or maximum) of a number over all ranks; the number itself where there is one rank."""
    if not (dist.is_available() and dist.is_initialized()):
        return float(value)
    total = torch.as_tensor(value, dtype=torch.float32, device=device).detach().clone()
    dist.all_reduce(total, op=dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM)
    return float(total)
