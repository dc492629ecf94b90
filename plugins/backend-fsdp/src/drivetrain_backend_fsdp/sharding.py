"""Sharding over ranks with FSDP2, and what it takes to sum gradients in place of averaging them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor


def shard(model: nn.Module, layers: Iterable[nn.Module], *, device_type: str, world_size: int) -> None:
    """Shard each layer, and the rest with the root, over all ranks; moves them to the device.

    Gradients are summed over ranks, in float32.
    """
    mesh = init_device_mesh(device_type, (world_size,), mesh_dim_names=("dp",))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for layer in [*layers, model]:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot divide on the way
    if hasattr(model, "packed_forward"):
        register_fsdp_forward_method(model, "packed_forward")


def release(model: nn.Module) -> None:
    """Free what a forward pass left gathered, so that parameters are their shards again."""
    if isinstance(model, FSDPModule):
        model.reshard()


def whole(tensor: Tensor) -> Tensor:
    """The full tensor, gathered from all ranks if it is sharded (then a collective call)."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> tuple[Tensor, int]:
    """This rank's part of a tensor that is split on its first dimension, and the row at which the part starts."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor, 0
    mesh = tensor.device_mesh
    share = -(-tensor.shape[0] // mesh.size())
    return tensor.to_local(), min(share * mesh.get_local_rank(), tensor.shape[0])


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
