"""Attention over packed sequences with flash kernels that take a row and the ends of its sequences (Dao 2023,
arXiv:2307.08691): those that PyTorch brings, and those of the package flash-attn. Nothing is padded."""

from __future__ import annotations

import importlib.util
import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from drivetrain import UserError

if TYPE_CHECKING:
    from drivetrain_backend_common.attention_kernels import Reach

WHERE = "backend.attention"
INSTALL = "pip install flash-attn --no-build-isolation, or set it to varlen"


class _Flash(ABC):
    name: str
    half = True

    def __init__(self, lengths: Sequence[int], device: torch.device, keys: Sequence[int] | None = None) -> None:
        self.spans = self.key_spans = _spans(lengths, device)
        if keys is not None:
            self.key_spans = _spans(keys, device)

    @classmethod
    def check(cls, device: torch.device, dtype: torch.dtype, *, learns: bool) -> None:
        if device.type != "cuda":
            raise UserError(f"{cls.name} runs on devices of type cuda, not on {device.type}", where=WHERE,
                            mend="set it to sdpa")  # fmt: skip
        if dtype.itemsize != 2:
            raise UserError(f"{cls.name} computes in half precision, not in {str(dtype).removeprefix('torch.')}",
                            where=WHERE, mend="set model.dtype=bfloat16, or backend.compute_dtype=bfloat16 if it has"
                            " that")  # fmt: skip

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, reach: Reach | None, *, scaling: float | None,
        softcap: float | None,
    ) -> Tensor:  # fmt: skip
        dim = query.shape[-1]
        if value.shape[-1] != dim or not _fits(dim):
            raise UserError(f"{self.name} takes heads of one size that is a multiple of 8 and at most 256; these have"
                            f" {dim} for keys and {value.shape[-1]} for values", where=WHERE,
                            mend="set it to sdpa or flex")  # fmt: skip
        if reach is not None and reach.chunked:
            raise UserError(f"{self.name} does not compute attention within chunks", where=WHERE,
                            mend="set it to sdpa or flex")  # fmt: skip
        window = (-1 if reach is None else reach.size - 1, 0)  # tokens before and after a token's own
        rows = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        return self.compute(*rows, window=window, scaling=scaling, softcap=softcap)

    @abstractmethod
    def compute(
        self, query: Tensor, key: Tensor, value: Tensor, *, window: tuple[int, int], scaling: float | None,
        softcap: float | None,
    ) -> Tensor:  # fmt: skip
        """``(tokens, heads, dim)`` to the same."""


def _fits(dim: int) -> bool:
    return dim % 8 == 0 and dim <= 256


def _spans(lengths: Sequence[int], device: torch.device) -> tuple[Tensor, int]:
    """The ends of sequences, and the longest of them."""
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device, non_blocking=True)
    return ends, max(lengths)


class Varlen(_Flash):
    """The kernel ``varlen``: ``torch.nn.attention.varlen``."""

    name = "varlen"

    @classmethod
    def check(cls, device: torch.device, dtype: torch.dtype, *, learns: bool) -> None:
        super().check(device, dtype, learns=learns)
        if not cls.known():
            raise UserError(f"torch {torch.__version__} has no attention over sequences of varying length with scales"
                            " and windows", where=WHERE, mend="install torch 2.11 or newer, or set it to flex",
                            )  # fmt: skip

    @staticmethod
    def known() -> bool:
        """Whether this torch has the kernel, with all that is asked of it."""
        return {"scale", "window_size"} <= _parameters().keys()

    @classmethod
    def suits(cls, device: torch.device, dtype: torch.dtype, dim: int) -> bool:
        """Whether it computes attention of heads of a size."""
        return device.type == "cuda" and dtype.itemsize == 2 and _fits(dim) and cls.known()

    def compute(
        self, query: Tensor, key: Tensor, value: Tensor, *, window: tuple[int, int], scaling: float | None,
        softcap: float | None,
    ) -> Tensor:  # fmt: skip
        from torch.nn.attention.varlen import varlen_attn

        if softcap is not None:
            raise UserError("varlen does not compute soft-capped attention", where=WHERE,
                            mend="set it to sdpa, flex or flash_attention_2")  # fmt: skip
        # fewer heads of keys need no word in releases that do not ask for one
        options: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in _parameters() else {}
        (ends, longest), (key_ends, longest_keys) = self.spans, self.key_spans
        out = varlen_attn(
            query, key, value, ends, key_ends, longest, longest_keys, scale=scaling, window_size=window, **options
        )
        return cast(Tensor, out)


def _parameters() -> dict[str, Any]:
    """Of varlen_attn; none in a torch that lacks it."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return {}
    return dict(inspect.signature(varlen_attn).parameters)


class FlashAttention2(_Flash):
    """The kernel ``flash_attention_2``: ``flash_attn_varlen_func`` of the package flash-attn."""

    name = "flash_attention_2"

    @classmethod
    def check(cls, device: torch.device, dtype: torch.dtype, *, learns: bool) -> None:
        super().check(device, dtype, learns=learns)
        if importlib.util.find_spec("flash_attn") is None:
            raise UserError("flash_attention_2 needs the package flash-attn, not installed here", where=WHERE,
                            mend=INSTALL)  # fmt: skip

    def compute(
        self, query: Tensor, key: Tensor, value: Tensor, *, window: tuple[int, int], scaling: float | None,
        softcap: float | None,
    ) -> Tensor:  # fmt: skip
        from flash_attn import flash_attn_varlen_func

        (ends, longest), (key_ends, longest_keys) = self.spans, self.key_spans
        out = flash_attn_varlen_func(
            query, key, value, ends, key_ends, longest, longest_keys, softmax_scale=scaling, causal=True,
            window_size=window, softcap=softcap or 0.0,
        )  # fmt: skip
        return cast(Tensor, out)
