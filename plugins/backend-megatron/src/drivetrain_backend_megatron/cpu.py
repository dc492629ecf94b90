"""What megatron-core needs to run on a CPU, over gloo.

megatron-core writes ``device="cuda"``, ``tensor.cuda()`` and ``torch.cuda.current_device()`` where it could ask for the
device of a tensor, and keeps random states and streams of CUDA. Inside :func:`stand_in` these mean the CPU:

* tensors that are asked for on, or moved to, a CUDA device are on the CPU, and pinned memory is plain memory;
* the current device is the CPU; streams and events do nothing, for work on a CPU is done when a call returns;
* the random state of "CUDA" is that of the CPU;
* ranks may gather, or sum and scatter, tensors of different lengths, which gloo does not do;
* the mixture's token dispatcher gets its splits as arrays, which on a device come with the copy to the host;
* functions that it compiles run as they are written, for a compiler of C++ need not be there.

Nothing is replaced outside the context, and nothing at all on a machine whose hardware is not ``cpu``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.moe import token_dispatcher
from torch import Tensor
from torch.overrides import TorchFunctionMode


class _Nothing:
    """A stream or an event of a device that has finished before it is asked."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *error: object) -> None: ...


class _OnCPU(TorchFunctionMode):
    """Reads a CUDA device as the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.pin_memory:
            return args[0].clone()  # pinning copies, and what it copies from may be freed
        if func is torch.Tensor.record_stream:
            return None
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:  # megatron-core sorts gradients by this name
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = torch.device("cpu")
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], torch.device("cpu"), *args[2:])
        return func(*args, **kwargs)


def _is_cuda(device: Any) -> bool:
    return isinstance(device, (str, torch.device)) and str(device).startswith("cuda")


def _all_gather(outputs: list[Tensor], mine: Tensor, group: Any = None, async_op: bool = False) -> Any:
    """Of tensors of different lengths, too."""
    if len({len(output) for output in outputs}) == 1:
        return _gloo_all_gather(outputs, mine, group=group, async_op=async_op)
    longest = max(len(output) for output in outputs)
    padded = mine.new_zeros(longest, *mine.shape[1:])
    padded[: len(mine)] = mine
    parts = [torch.empty_like(padded) for _ in outputs]
    _gloo_all_gather(parts, padded, group=group)
    for output, part in zip(outputs, parts, strict=True):
        output.copy_(part[: len(output)])
    return None


def _reduce_scatter(output: Tensor, inputs: list[Tensor], op: Any = dist.ReduceOp.SUM, group: Any = None,
                    async_op: bool = False) -> Any:  # fmt: skip
    """Of tensors of different lengths, too."""
    if len({len(part) for part in inputs}) == 1:
        return _gloo_reduce_scatter(output, inputs, op=op, group=group, async_op=async_op)
    total = torch.cat(inputs)
    dist.all_reduce(total, op=op, group=group)
    output.copy_(total.split([len(part) for part in inputs])[dist.get_rank(group)])
    return None


_gloo_all_gather, _gloo_reduce_scatter = dist.all_gather, dist.reduce_scatter


def _as_array(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


@contextlib.contextmanager
def _replaced(module: ModuleType, **values: Any) -> Iterator[None]:
    before = {name: getattr(module, name) for name in values}
    for name, value in values.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


@contextlib.contextmanager
def stand_in() -> Iterator[None]:
    """Let the CPU stand in for a CUDA device in calls of megatron-core; contexts may be nested."""
    stream = _Nothing()
    device = torch.device("cpu")
    cuda = {
        "current_device": lambda: device,
        "set_device": lambda *_: None,
        "synchronize": lambda *_, **__: None,
        "current_stream": lambda *_, **__: stream,
        "default_stream": lambda *_, **__: stream,
        "stream": lambda *_, **__: contextlib.nullcontext(),
        "Stream": _Nothing,
        "Event": _Nothing,
        "manual_seed": torch.manual_seed,
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
    }
    tracker = {
        "_get_cuda_rng_state": lambda *_, **__: torch.get_rng_state(),
        "_set_cuda_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
    }
    with (
        _replaced(torch.cuda, **cuda),
        _replaced(megatron_random, **tracker),
        _replaced(dist, all_gather=_all_gather, reduce_scatter=_reduce_scatter),
        _replaced(token_dispatcher, maybe_move_tensor_to_cpu=_as_array),
        torch.compiler.set_stance("force_eager"),
        _OnCPU(),
    ):
        yield
