"""Causal attention over packed sequences, as an attention implementation of transformers.

While a packing is active (:func:`packed`), queries, keys and values of ``(1, heads, tokens, dim)`` are regrouped to
``(sequences, heads, longest, dim)``, right padded, for sequences of similar length at a time. Causal attention needs
no mask for right padding, and nothing of ``tokens x tokens`` exists. Outside, everything is as with ``sdpa``, so that
the same module serves for generation. Where ranks share the packed row (:mod:`.ulysses`), tensors of ``tokens / ranks``
and all heads are exchanged for ones of all tokens and ``heads / ranks`` first, and the result back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import chunked_causal_mask_function, sdpa_mask, sliding_window_causal_mask_function

from drivetrain import UserError

if TYPE_CHECKING:
    from drivetrain_backend_fsdp.ulysses import SequenceRanks

NAME = "drivetrain_packed"
"""Name of the implementation in transformers' registries."""

SIMILAR = 0.75
"""The shortest sequence of a group has at least this share of the longest one's tokens."""


@dataclass(frozen=True)
class Group:
    """Neighbouring sequences of similar length: tokens ``start`` to ``stop`` of the packed row."""

    start: int
    stop: int
    sequences: int
    longest: int
    place: Tensor | None
    """of each token in ``sequences * longest``; None where all are equally long"""

    def split(self, packed: Tensor) -> Tensor:
        """``(1, heads, tokens, dim)`` to ``(sequences, heads, longest, dim)``; a view where no padding is needed."""
        tokens = packed[0].transpose(0, 1)[self.start : self.stop]
        if self.place is not None:
            tokens = cast(Tensor, _Spread.apply(tokens, self.place, self.sequences * self.longest))
        return tokens.reshape(self.sequences, self.longest, *tokens.shape[1:]).transpose(1, 2)

    def join(self, separate: Tensor) -> Tensor:
        """``(sequences, heads, longest, dim)`` to ``(stop - start, heads, dim)``."""
        tokens = separate.transpose(1, 2).flatten(0, 1)
        return tokens if self.place is None else cast(Tensor, _Gather.apply(tokens, self.place))


class _Spread(torch.autograd.Function):
    """Rows to their places among zeros. Places differ, so the gradient is a plain selection."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, place: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(place)
        return rows.new_zeros(size, *rows.shape[1:]).index_copy_(0, place, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(0, ctx.saved_tensors[0]), None, None


class _Gather(torch.autograd.Function):
    """The inverse of :class:`_Spread`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        ctx.size = len(rows)
        return rows.index_select(0, place)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.new_zeros(ctx.size, *grad.shape[1:]).index_copy_(0, ctx.saved_tensors[0], grad), None


def groups(lengths: Sequence[int], device: torch.device) -> tuple[Group, ...]:
    """Cut a packed row, longest sequence first, into groups of similar length."""
    result = []
    first = start = 0
    while first < len(lengths):
        longest = lengths[first]
        end = first
        while end < len(lengths) and lengths[end] >= SIMILAR * longest:
            end += 1
        mine = lengths[first:end]
        place = None
        if mine[-1] != longest:
            place = torch.cat([torch.arange(n) + i * longest for i, n in enumerate(mine)]).to(device)
        result.append(Group(start, start + sum(mine), len(mine), longest, place))
        first, start = end, start + sum(mine)
    return tuple(result)


@dataclass(frozen=True)
class Packing:
    """The sequences of a packed row, longest first, and the ranks that share it."""

    groups: tuple[Group, ...]
    ranks: SequenceRanks | None = None


_active: ContextVar[Packing | None] = ContextVar("drivetrain_packing", default=None)


def active() -> Packing | None:
    """The packing that attention now follows."""
    return _active.get()


@contextmanager
def packed(packing: Packing | None) -> Iterator[None]:
    """Let attention follow a packing."""
    token = _active.set(packing)
    try:
        yield
    finally:
        _active.reset(token)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention by transformers' protocol: ``(1, heads, tokens, dim)`` to ``(1, tokens, heads, dim)``."""
    packing = _active.get()
    softcap = cast("float | None", kwargs.get("softcap"))
    if packing is None and softcap is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    for name in ("s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise UserError(f"attention with {name!r} is not implemented", where="backend fsdp")
    if packing is None:
        assert softcap is not None
        return _softcapped(query, key, value, attention_mask, scaling, softcap).transpose(1, 2), None
    if packing.ranks is not None:
        query, key, value = packing.ranks.to_heads(query, key, value)
    grouped_heads = query.shape[1] != key.shape[1]
    # The kernels that save memory share key heads only where no mask is given and, but for the CPU, in half precision.
    share = grouped_heads and attention_mask is None and (query.device.type == "cpu" or query.dtype.itemsize == 2)
    outputs = []
    for group in packing.groups:
        q, k, v = (group.split(tensor) for tensor in (query, key, value))
        mask = None if attention_mask is None else attention_mask[..., : group.longest, : group.longest]
        if softcap is not None:
            outputs.append(group.join(_softcapped(q, k, v, mask, scaling, softcap)))
            continue
        if grouped_heads and not share:
            k, v = (heads.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for heads in (k, v))
        outputs.append(
            group.join(
                scaled_dot_product_attention(
                    q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=scaling, enable_gqa=share
                )
            )
        )
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    if packing.ranks is not None:
        joined = packing.ranks.to_tokens(joined)
    return joined[None], None


def _softcapped(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None, softcap: float
) -> Tensor:
    """softmax(c tanh(s q k^T / c)) v, for which there is no fused kernel; the scores of all pairs exist."""
    key, value = (heads.repeat_interleave(query.shape[1] // heads.shape[1], dim=1) for heads in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = (scores / softcap).tanh() * softcap
    if mask is None and query.shape[2] > 1:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return scores.softmax(dim=-1, dtype=torch.float32).to(value.dtype) @ value


def attention_mask(*, local_size: int | None = None, **kwargs: Any) -> Tensor | None:
    """The mask that :func:`attention` gets.

    None while a packing is active, except where sequences are longer than the window or chunk ``local_size`` that a
    layer looks back: then the mask of the longest sequence. That is the first in the row, so that transformers'
    mask function describes it at the row's first indices, and the mask of a shorter one is a corner of it.
    """
    packing = _active.get()
    if packing is None:
        return sdpa_mask(local_size=local_size, **kwargs)
    longest = packing.groups[0].longest
    if local_size is None or longest <= local_size:
        return None
    kwargs |= {"q_length": longest, "kv_length": longest, "attention_mask": None, "allow_is_causal_skip": False}
    if packing.ranks is not None:
        kwargs["mask_function"] = _local(local_size, **kwargs)
    return sdpa_mask(local_size=local_size, **kwargs)


def _local(size: int, *, config: Any, device: Any, use_vmap: bool = False, **_: Any) -> Any:
    """transformers' mask function of a sequence by itself; the one that it gives goes by positions of a rank's share.

    Raises:
        drivetrain.UserError: when a model has changed its mask by functions of its own.
    """
    if use_vmap:
        raise UserError("a mask of the model's own is not implemented for ranks that share sequences",
                        where="backend fsdp", mend="set sequence_parallel to 1")  # fmt: skip
    if size == getattr(config, "attention_chunk_size", None):
        return chunked_causal_mask_function(size, torch.zeros(1, dtype=torch.long, device=device))
    return sliding_window_causal_mask_function(size)


def register() -> None:
    """Make the implementation known to transformers, under :data:`NAME`."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, attention_mask)
