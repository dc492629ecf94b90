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


def shard(
    model: nn.Module, layers: Iterable[nn.Module], *, device_type: str, world_size: int, on_host: bool = False
) -> None:
    """Shard each layer, and the rest with the root, over all ranks; moves them to the device.

    Gradients are summed over ranks, in float32.

    Args:
        on_host: keep shards and their gradients in host memory, and copy a layer's to the device when it is gathered.
    """
    mesh = init_device_mesh(device_type, (world_size,), mesh_dim_names=("dp",))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    placing = CPUOffloadPolicy(pin_memory=device_type != "cpu") if on_host else OffloadPolicy()
    for layer in [*layers, model]:
        fully_shard(layer, mesh=mesh, mp_policy=policy, offload_policy=placing)
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
    if not isinstance(tensor, DTensor):
        return tensor
    kind = tensor.device_mesh.device_type
    if tensor.device.type != kind:  # a shard in host memory; ranks talk between devices
        tensor = cast(DTensor, tensor.to(kind))
    return tensor.full_tensor()


def total_norm(tensors: Sequence[Tensor], device: torch.device) -> float:
    """2-norm of all tensors together; a collective call where they are sharded."""
    if not tensors:
        return 0.0
    if isinstance(tensors[0], DTensor) and tensors[0].device.type != device.type:
        norm = float(torch.nn.utils.get_total_norm([local(tensor)[0] for tensor in tensors]))
        return math.sqrt(reduce(norm**2, device))
    return float(whole(torch.nn.utils.get_total_norm(tensors)))


def local(tensor: Tensor) -> tuple[Tensor, int]:
    """This rank's part of a tensor that is split on its first dimension, and the row at which the part starts."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor, 0
    mesh = tensor.device_mesh
    share = -(-tensor.shape[0] // mesh.size())
    return tensor.to_local(), min(share * mesh.get_local_rank(), tensor.shape[0])


def reduce(value: Any, device: torch.device, *, largest: bool = False) -> float:
    """Sum (or maximum) of a number over all ranks; the number itself where there is one rank."""
    if not (dist.is_available() and dist.is_initialized()):
        return float(value)
    total = torch.as_tensor(value, dtype=torch.float32, device=device).detach().clone()
    dist.all_reduce(total, op=dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM)
    return float(total)
