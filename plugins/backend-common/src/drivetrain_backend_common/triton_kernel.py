"""Log-probabilities and entropies of a chunk in one pass over its logits, and their gradient in another, in Triton.

The first kernel keeps, of the logits z that it has seen, the largest m, and sums with exponents relative to it:

    s = sum exp(z - m)        t = sum exp(z - m) (z - m)

    logsumexp(z) = m + log s        H = log s - t / s

When a larger m' comes, ``t <- exp(m - m') (t + (m - m') s)`` and ``s <- exp(m - m') s`` (online softmax, Milakov and
Gimelshein 2018, arXiv:1805.02867, with a second sum).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from drivetrain_backend_common.log_probs import Head
from drivetrain_backend_common.logit_kernels import LogitKernel

BLOCK = 4096  # numbers that a program holds at a time
PER_WARP = 512


class Triton(LogitKernel):
    """Reads the products ``x`` of a chunk once a pass.

    With half precision weights the gradient is a tensor of ``(chunk, vocabulary)`` in their dtype; with float32 it
    takes the place of ``x``.
    """

    def __init__(self, head: Head, temperature: float, memory: Tensor) -> None:
        super().__init__(head, temperature, memory)
        factor = head.scale / temperature
        bend = (factor, 0.0) if head.softcap is None else (head.scale / head.softcap, head.softcap / temperature)
        block = min(BLOCK, triton.next_power_of_2(memory.shape[1]))
        self._result: Tensor | None = None
        self._options: dict[str, Any] = {
            "vocabulary": memory.shape[1], "inner": bend[0], "outer": bend[1], "CAPPED": head.softcap is not None,
            "BLOCK": block, "num_warps": max(1, block // PER_WARP),
        }  # fmt: skip

    def statistics(
        self, hidden: Tensor, targets: Tensor, log_probs: Tensor, lse: Tensor, entropies: Tensor | None
    ) -> None:
        x = self.head.products(hidden, out=self.memory[: len(hidden)])
        _statistics[(len(x),)](
            x, targets, log_probs, lse, entropies, x.stride(0), ENTROPY=entropies is not None, **self._options
        )

    def gradient(
        self, hidden: Tensor, targets: Tensor, lse: Tensor, entropies: Tensor | None, grad_log_probs: Tensor,
        grad_entropies: Tensor | None, *, computed: bool,
    ) -> Tensor:  # fmt: skip
        x = self.memory[: len(hidden)]
        if not computed:
            self.head.products(hidden, out=x)
        if self._result is None:
            dtype = self.head.weight.dtype
            self._result = self.memory if dtype == torch.float32 else torch.empty_like(self.memory, dtype=dtype)
        result = self._result[: len(x)]
        grid = (len(x), triton.cdiv(x.shape[1], self._options["BLOCK"]))
        _gradient[grid](
            x, result, targets, lse, entropies, grad_log_probs, grad_entropies, x.stride(0), result.stride(0),
            ENTROPY=grad_entropies is not None, **self._options,
        )  # fmt: skip
        return result


@triton.jit  # type: ignore[untyped-decorator]
def _bend(x, inner, outer, CAPPED: tl.constexpr):  # type: ignore[no-untyped-def]
    """From products to logits."""
    z = x * inner
    if CAPPED:
        z = outer * (1.0 - 2.0 / (tl.exp(2.0 * z) + 1.0))  # tanh
    return z


@triton.jit  # type: ignore[untyped-decorator]
def _statistics(  # type: ignore[no-untyped-def]
    logits, targets, log_probs, lse, entropies, stride, vocabulary, inner, outer,
    CAPPED: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row a program."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    columns = tl.arange(0, BLOCK)
    largest = -float("inf")
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    weighted = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, vocabulary, BLOCK):
        inside = start + columns < vocabulary
        x = tl.load(logits + start + columns, mask=inside, other=0.0)
        z = tl.where(inside, _bend(x, inner, outer, CAPPED), -float("inf"))
        now = tl.maximum(largest, tl.max(z, 0))
        shrink = tl.exp(largest - now)
        share = tl.exp(z - now)
        if ENTROPY:
            shift = tl.where(start == 0, 0.0, largest - now)
            weighted = shrink * (weighted + shift * total) + share * tl.where(inside, z - now, 0.0)
        total = shrink * total + share
        largest = now
    summed = tl.sum(total, 0)
    log_sum = tl.log(summed)
    target = tl.load(targets + row)
    known = (target >= 0) & (target < vocabulary)
    chosen = _bend(tl.load(logits + target, mask=known, other=float("nan")), inner, outer, CAPPED)
    tl.store(log_probs + row, chosen - largest - log_sum)
    tl.store(lse + row, largest + log_sum)
    if ENTROPY:
        tl.store(entropies + row, log_sum - tl.sum(weighted, 0) / summed)


@triton.jit  # type: ignore[untyped-decorator]
def _gradient(  # type: ignore[no-untyped-def]
    logits, result, targets, lse, entropies, grad_log_probs, grad_entropies, logits_stride, result_stride, vocabulary,
    inner, outer, CAPPED: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of a row a program; ``result`` may be ``logits``."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocabulary
    x = tl.load(logits + row * logits_stride + columns, mask=inside, other=0.0)
    z = _bend(x, inner, outer, CAPPED)
    log_p = z - tl.load(lse + row)
    p = tl.exp(log_p)
    hit = columns == tl.load(targets + row)
    if ENTROPY:
        up = tl.load(grad_log_probs + row)
        spread = tl.load(grad_entropies + row)
        gradient = tl.where(hit, up, 0.0) - p * (up + spread * (log_p + tl.load(entropies + row)))
    else:
        gradient = p - tl.where(hit, 1.0, 0.0)
    if CAPPED:
        tanh = z / outer
        gradient *= 1.0 - tanh * tanh
    tl.store(result + row * result_stride + columns, gradient.to(result.dtype.element_ty), mask=inside)
