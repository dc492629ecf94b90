"""Recomputation of layers in the backward pass, in place of keeping their activations."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from drivetrain_backend_fsdp.attention import active, packed


def recompute(layers: Iterable[nn.Module]) -> None:
    """Let each layer keep its input alone.

    transformers' own switch asks for training mode, which would also switch dropout on. The packing is put back for
    the second computation, which runs after the forward pass has left it, on some devices in another thread.
    """
    for layer in layers:
        layer.forward = _recomputed(layer.forward)  # type: ignore[method-assign]


def _recomputed(forward: Any) -> Any:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        packing = active()

        def run(*args: Any, **kwargs: Any) -> Any:
            with packed(packing):
                return forward(*args, **kwargs)

        return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return wrapped
