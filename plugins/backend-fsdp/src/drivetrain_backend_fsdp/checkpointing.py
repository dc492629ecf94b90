"""Recomputation of layers in the backward pass, in place of keeping their activations."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from drivetrain_backend_fsdp.attention import active, packed

PRODUCTS = ("aten::mm", "aten::addmm", "aten::_grouped_mm", "aten::linear")
ATTENTION = (
    "aten::_scaled_dot_product_",  # its flash, efficient and cuDNN kernels, on CPUs too
    "aten::_flash_attention_forward",
    "aten::_efficient_attention_forward",
    "torch_attn::_varlen_attn",
    "flash_attn::_flash_attn_varlen_forward",
)


def recompute(layers: Iterable[nn.Module], *, selective: bool = False) -> None:
    """Let each layer keep its input alone; ``selective``: and results of matrix products and of attention.

    transformers' own switch asks for training mode, which would also switch dropout on. The packing is put back for
    the second computation, which runs after the forward pass has left it, on some devices in another thread.
    """
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if selective:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, keep)
    for layer in layers:
        layer.forward = _recomputed(layer.forward, options)  # type: ignore[method-assign]


def keep(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Results of matrix products and of fused attention are kept; what lies between them is computed again.

    Of a layer's operations these are nearly all, and of its activations less than half. A product with a weight of
    ``features`` inputs costs ``features`` operations for each byte it saves in bfloat16, attention about as many as a
    sequence has tokens, and norms, rotations, activations and residuals a few. Scores of attention that is not fused
    are ``tokens x tokens`` and are not kept.
    """
    name = operation.name() if hasattr(operation, "name") and callable(operation.name) else str(operation)
    kept = name.split(".")[0] in PRODUCTS or name.startswith(ATTENTION)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _recomputed(forward: Any, options: dict[str, Any]) -> Any:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        packing = active()

        def run(*args: Any, **kwargs: Any) -> Any:
            with packed(packing):
                return forward(*args, **kwargs)

        return checkpoint(run, *args, **options, **kwargs)

    return wrapped
