"""Causal attention over packed sequences, as an attention implementation of transformers.

While a packing is active (:func:`packed`), attention stays within the sequences of the packed row, by the kernel that
the packing brings. Outside, everything is as with ``sdpa``, so that the same module serves for generation. Where ranks
share the packed row (:mod:`.ulysses`), tensors of ``tokens / ranks`` and all heads are exchanged for ones of all tokens
and ``heads / ranks`` first, and the result back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from drivetrain import UserError
from drivetrain_backend_common.attention_kernels import Reach
from drivetrain_backend_common.sdpa import softcapped

if TYPE_CHECKING:
    from drivetrain_backend_common.attention_kernels import Kernel
    from drivetrain_backend_fsdp.ulysses import SequenceRanks

NAME = "drivetrain_packed"
"""Name of the implementation in transformers' registries."""


@dataclass(frozen=True)
class Packing:
    """The kernel that knows the sequences of a packed row, tokens of the longest, and the ranks that share the row."""

    kernel: Kernel
    longest: int
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
    attention_mask: Tensor | Reach | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention by transformers' protocol: ``(1, heads, tokens, dim)`` to ``(1, tokens, heads, dim)``.

    Dropout applies outside of packings alone: a model that learns here has none.
    """
    packing = _active.get()
    softcap = cast("float | None", kwargs.get("softcap"))
    if packing is None and softcap is None:
        return sdpa_attention_forward(
            module, query, key, value, cast(Any, attention_mask), dropout=dropout, scaling=scaling, **kwargs
        )
    for name in ("s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise UserError(f"attention with {name!r} is not implemented", where="backend fsdp")
    if isinstance(attention_mask, Tensor):
        if packing is not None:
            raise _own_mask()
        assert softcap is not None
    if packing is None:
        mask = cast("Tensor | None", attention_mask)
        return softcapped(query, key, value, mask, scaling, cast(float, softcap)).transpose(1, 2), None
    if packing.ranks is not None:
        query, key, value = packing.ranks.to_heads(query, key, value)
    kind = query.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
    query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
    with torch.autocast(kind, enabled=False):
        outputs = packing.kernel(
            query, key, value, cast("Reach | None", attention_mask), scaling=scaling, softcap=softcap
        )
    if packing.ranks is not None:
        outputs = packing.ranks.to_tokens(outputs)
    return outputs[None], None


def attention_mask(
    *, local_size: int | None = None, use_vmap: bool = False, config: Any = None, **kwargs: Any
) -> Tensor | Reach | None:
    """The mask that :func:`attention` gets.

    While a packing is active, how far tokens look back, where sequences are longer than the window or chunk
    ``local_size`` of a layer; None elsewhere.

    Raises:
        drivetrain.UserError: when a model has changed its mask by functions of its own.
    """
    packing = _active.get()
    if packing is None:
        return sdpa_mask(local_size=local_size, use_vmap=use_vmap, config=config, **kwargs)
    if use_vmap:
        raise _own_mask()
    if local_size is None or packing.longest <= local_size:
        return None
    return Reach(local_size, chunked=local_size == getattr(config, "attention_chunk_size", None))


def _own_mask() -> UserError:
    return UserError("an attention mask of the model's own is not implemented; windows and chunks are",
                     where="backend fsdp", mend="train a model of another family, or with another backend",
                     )  # fmt: skip


def register() -> None:
    """Make the implementation known to transformers, under :data:`NAME`."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, attention_mask)
