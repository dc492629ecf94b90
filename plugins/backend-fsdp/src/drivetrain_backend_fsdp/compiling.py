"""Decoder layers compiled one by one."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterable
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn
from transformers import AttentionInterface

from drivetrain import UserError
from drivetrain_backend_common import dynamo
from drivetrain_backend_fsdp import attention


def compile_layers(layers: Iterable[nn.Module], device: torch.device) -> None:
    """Let each layer run compiled while a packing is active; generation, of ever other shapes, stays as it is.

    Layers of one kind share their graphs. These break around attention, which goes by the packing. The number of tokens
    is a variable of the graphs, so that rows of every length share them; rows of one token, which ranks without work
    run, have graphs of their own.

    Raises:
        drivetrain.UserError: when there is nothing that compiles for the device.
    """
    _check(device)
    dynamo.allow_graphs()
    AttentionInterface.register(attention.NAME, torch.compiler.disable(attention.attention))
    for layer in layers:
        layer.forward = _compiled(layer.forward)  # type: ignore[method-assign]


def _check(device: torch.device) -> None:
    if device.type == "cpu":
        if not any(shutil.which(name) for name in (os.environ.get("CXX", ""), "g++", "clang++") if name):
            raise UserError("compiling for a CPU needs a C++ compiler, and neither g++ nor clang++ is here",
                            where="backend.compile", mend="install one, or set it to false")  # fmt: skip
    elif importlib.util.find_spec("triton") is None:
        raise UserError(f"compiling for {device.type} needs triton, which is not installed here",
                        where="backend.compile", mend="install a torch that brings it, or set it to false",
                        )  # fmt: skip


def _compiled(forward: Any) -> Any:
    fast = torch.compile(forward)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if attention.active() is None:
            return forward(*args, **kwargs)
        _mark(args)
        _mark(kwargs.values())
        return fast(*args, **kwargs)

    return wrapped


def _mark(inputs: Iterable[Any]) -> None:
    """Say that the second dimension of ``(1, tokens, ...)`` varies."""
    for given in inputs:
        if isinstance(given, tuple):
            _mark(given)
        elif isinstance(given, Tensor) and given.dim() > 1:
            torch._dynamo.maybe_mark_dynamic(given, 1)
