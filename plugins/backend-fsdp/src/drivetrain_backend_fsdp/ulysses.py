"""Ulysses sequence parallelism (Jacobs et al. 2023, arXiv:2309.14509): ranks that each hold a share of a packed row.

Between attentions a rank computes ``tokens / size`` neighbouring tokens. Around attention an all-to-all turns
``(tokens / size, heads)`` into ``(tokens, heads / size)``, and another one turns the result back, so that attention
sees whole sequences with a share of the heads.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import pad

from drivetrain import RunError, UserError

if TYPE_CHECKING:
    from drivetrain import BackendContext
    from drivetrain_backend_common.rows import Tokens
    from drivetrain_backend_fsdp.packing import Packed


@dataclass(frozen=True)
class SequenceRanks:
    """The ranks that share each packed row, and this rank's place among them."""

    group: dist.ProcessGroup
    rank: int
    size: int

    # -- rows ---------------------------------------------------------------------------------------------------------

    def check_rows(self, tokens: Tokens, device: torch.device) -> None:
        """Compare the rows that the ranks were given: a collective call.

        Raises:
            drivetrain.RunError: when they differ, for shares of different rows would make a row of neither.
        """
        content = hashlib.blake2b(digest_size=7)
        for part in (tokens.input_ids[tokens.read], tokens.read.sum(dim=1), tokens.wanted):
            content.update(part.numpy().tobytes())
        digest = int.from_bytes(content.digest(), "little")
        largest = torch.tensor([digest, -digest], device=device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group)
        if int(largest[0]) != -int(largest[1]):
            raise RunError("ranks that share each sequence were given different rows", where="backend fsdp",
                           mend="use one sequence_parallel for all models of a worker, and dispatch by mesh 'train'",
                           )  # fmt: skip

    def cut(self, packed: Packed) -> Packed:
        """This rank's share of a packed row, which is filled up with sequences of one token to a multiple of ranks."""
        tokens = packed.input_ids.shape[1]
        share = -(-tokens // self.size)
        filling = share * self.size - tokens
        start = self.rank * share
        own = (packed.predictor // share == self.rank).nonzero()[:, 0]
        return replace(
            packed,
            input_ids=pad(packed.input_ids, (0, filling))[:, start : start + share],
            position_ids=pad(packed.position_ids, (0, filling))[:, start : start + share],
            lengths=(*packed.lengths, *(1,) * filling),
            predictor=packed.predictor[own] - start,
            target=packed.target[own],
            own=own,
            ranks=self,
        )

    def gather(self, outputs: Mapping[str, Tensor], packed: Packed) -> dict[str, Tensor]:
        """Outputs ``(own, ...)`` of each rank's wanted tokens to ``(wanted, ...)`` of all, on every rank.

        Every rank of the group then computes the same loss L, and the gradients of all ranks are summed. Backward, a
        rank passes on dL / d output of its own tokens alone; the all-to-alls bring what their keys and values did to
        tokens of others, and the reverse. So the sum over the group is dL once, with the factor 1. The adjoint of the
        sum over ranks would add up the equal gradients of all ranks, and L would count ``size`` times.
        """
        own, wanted = cast(Tensor, packed.own), len(packed.row)
        return {name: cast(Tensor, _Gather.apply(output, own, wanted, self.group)) for name, output in outputs.items()}

    # -- attention ----------------------------------------------------------------------------------------------------

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """``(1, heads, tokens / size, dim)`` each to ``(1, heads / size, tokens, dim)``.

        Heads of keys and values are repeated as often as it takes to give each rank those that its queries look at.

        Raises:
            drivetrain.UserError: when the heads do not divide into ``size`` equal parts.
        """
        heads, kind = query.shape[1], query.device.type
        if heads % self.size:
            raise UserError(f"{heads} attention heads do not divide among sequence_parallel={self.size} ranks",
                            where="backend fsdp", mend=f"choose a sequence_parallel that divides {heads}")  # fmt: skip
        repeats = self.size // math.gcd(key.shape[1], self.size)
        if repeats > 1:
            key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
        parts = [tensor[0].to(dtype).transpose(0, 1).unflatten(1, (self.size, -1)) for tensor in (query, key, value)]
        sent = torch.cat([part.flatten(2).transpose(0, 1) for part in parts], dim=2)  # (size, share, features)
        got = cast(Tensor, _Exchange.apply(sent, self.group)).flatten(0, 1)
        split = got.split([part[0, 0].numel() for part in parts], dim=1)
        return tuple(
            tensor.unflatten(1, part.shape[2:]).transpose(0, 1)[None] for tensor, part in zip(split, parts, strict=True)
        )

    def to_tokens(self, outputs: Tensor) -> Tensor:
        """``(tokens, heads / size, dim)`` to ``(tokens / size, heads, dim)``."""
        got = cast(Tensor, _Exchange.apply(outputs.unflatten(0, (self.size, -1)), self.group))
        return got.transpose(0, 1).flatten(1, 2)


class _Exchange(torch.autograd.Function):
    """Part i of rank j becomes part j of rank i, along the first dimension. It is its own adjoint."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_to_all(parts, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(grad, ctx.group), None


def _all_to_all(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = parts.contiguous()
    got = torch.empty_like(parts)
    dist.all_to_all_single(got, parts, group=group)
    return got


class _Gather(torch.autograd.Function):
    """See :meth:`SequenceRanks.gather`."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, own: Tensor, wanted: int, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(own)
        whole = values.new_zeros(wanted, *values.shape[1:]).index_copy_(0, own, values)
        dist.all_reduce(whole, group=group)  # of each token one rank has the value, and the others zero
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return grad.index_select(0, ctx.saved_tensors[0]), None, None, None


def join(context: BackendContext, size: int, device: torch.device) -> SequenceRanks | None:
    """The group of ``size`` neighbouring ranks that this one belongs to; None for a size of 1. A collective call.

    Raises:
        drivetrain.UserError: when the ranks do not make groups of that size, or the role has no packed rows.
    """
    if size == 1:
        return None
    if context.role == "reward":
        raise UserError("a classifier runs padded rows, of which ranks hold no shares",
                        where="reward_model.backend.sequence_parallel", mend="set it to 1")  # fmt: skip
    if context.world_size % size:
        raise UserError(f"sequence_parallel={size} does not divide the {context.world_size} processes of the role",
                        where=f"{context.role}.backend.sequence_parallel",
                        mend=f"choose a divisor of {context.world_size}, or another number of processes")  # fmt: skip
    mesh = init_device_mesh(device.type, (context.world_size // size, size), mesh_dim_names=("dp", "cp"))
    return SequenceRanks(mesh.get_group("cp"), context.rank % size, size)
