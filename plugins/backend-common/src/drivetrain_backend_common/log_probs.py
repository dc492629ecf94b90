"""Log-probabilities and entropies of tokens from hidden states, some tokens' logits at a time.

With hidden state h, head W and b, target y, scale s, soft cap c and temperature T:

    x = h W^T + b        z = s x / T,  or with a cap  c tanh(s x / c) / T
    log p(y) = z_y - logsumexp(z)        H = logsumexp(z) - sum_v p_v z_v

    d log p(y) / dz_v = [v = y] - p_v        dH / dz_v = -p_v (log p_v + H)

The backward pass computes the logits of all chunks but the last a second time, so that logits of
``(tokens, vocabulary)`` never exist. It begins with the last chunk, whose log-probabilities the forward pass left, and
computes the others in the same memory, one float32 tensor of ``(chunk, vocabulary)``; half precision weights add one in
their dtype. What else a chunk needs is said by the kernel that does its elementwise part.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from drivetrain_backend_common.logit_kernels import Chunked, LogitKernel


@dataclass(frozen=True, kw_only=True)
class Head:
    """The way from hidden states to logits.

    Attributes:
        weight, bias: ``(vocabulary, hidden)`` and ``(vocabulary,)``.
        scale: factor of the logits.
        softcap: logits are bent into ``(-softcap, softcap)``.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    def products(self, hidden: Tensor, *, out: Tensor | None = None) -> Tensor:
        """``x = h W^T + b``, ``(tokens, vocabulary)`` in float32; in ``out`` where it is given. Not differentiable.

        Half precision weights round it to their dtype, but for devices whose products of them can be float32.
        """
        if self.weight.dtype == torch.float32:
            if self.bias is None:
                return torch.mm(hidden, self.weight.t(), out=out)
            return torch.addmm(self.bias, hidden, self.weight.t(), out=out)
        if _widens(hidden.device, hidden.dtype):
            x = torch.mm(hidden, self.weight.t(), out_dtype=torch.float32, out=out)
            return x if self.bias is None else x.add_(self.bias)
        product = linear(hidden, self.weight, self.bias)
        return product.float() if out is None else out.copy_(product)

    def logits(self, hidden: Tensor, temperature: float = 1.0, *, out: Tensor | None = None) -> Tensor:
        """``z``, as :meth:`products`: scaled, capped and divided by the temperature."""
        logits = self.products(hidden, out=out)
        if self.softcap is not None:
            return logits.mul_(self.scale / self.softcap).tanh_().mul_(self.softcap / temperature)
        factor = self.scale / temperature
        return logits if factor == 1 else logits.mul_(factor)


class VocabularyRanks(Protocol):
    """Ranks that have some rows of the output layer each.

    Attributes:
        start: the first token of the vocabulary that this rank has.
    """

    start: int

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks: a collective call."""

    def max(self, tensor: Tensor) -> Tensor:
        """The maximum over the ranks: a collective call."""


def token_log_probs(
    hidden: Tensor, targets: Tensor, head: Head, *, temperature: float, chunk_tokens: int, entropy: bool,
    kernel: type[LogitKernel] = Chunked, ranks: VocabularyRanks | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Log-probability of each target, and the entropy of the distribution it belongs to.

    Where ranks share the vocabulary, the head is this rank's part of it, and a few numbers a token travel, no logits:
    with the logsumexp L_r and entropy H_r of each rank's part,

        L = log sum_r exp(L_r)        H = L - sum_r exp(L_r - L) (L_r - H_r)

    The gradient of the hidden states is then this rank's share of a sum over the ranks.

    Args:
        hidden: ``(tokens, hidden)``.
        targets: ``(tokens,)``, tokens of the whole vocabulary.
        temperature: logits are divided by it.
        chunk_tokens: tokens whose logits exist at one time.
        entropy: whether to compute the second result; it is None otherwise.
        kernel: does the elementwise part.
        ranks: that share the vocabulary.

    Returns:
        ``(tokens,)`` in float32 each, differentiable in hidden states, weight and bias.
    """
    log_probs, entropies = _TokenLogProbs.apply(
        hidden, head.weight, head.bias, targets, (head.scale, head.softcap, temperature), chunk_tokens, entropy, kernel,
        ranks,
    )  # fmt: skip
    return log_probs, entropies


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, shape: Any, chunk: int,
        entropy: bool, kernel: type[LogitKernel], ranks: VocabularyRanks | None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        scale, softcap, temperature = shape
        targets = targets.contiguous() if ranks is None else _own(targets, ranks.start, len(weight))
        log_probs = hidden.new_empty(len(hidden), dtype=torch.float32)
        lse, entropies = torch.empty_like(log_probs), torch.empty_like(log_probs) if entropy else None
        logits = _buffer(hidden, weight, chunk)
        work = kernel(Head(weight=weight, bias=bias, scale=scale, softcap=softcap), temperature, logits)
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            work.statistics(
                hidden[part], targets[part].clamp(min=0), log_probs[part], lse[part],
                None if entropies is None else entropies[part],
            )  # fmt: skip
        if ranks is not None:
            log_probs, lse, entropies = _joined(ranks, targets, log_probs, lse, entropies)
        ctx.save_for_backward(hidden, weight, bias, targets, lse, entropies)
        ctx.options = (shape, chunk, kernel)
        # what the kernel left of the last chunk, if it is of the whole vocabulary
        ctx.logits = logits if any(ctx.needs_input_grad[:3]) and ranks is None else None
        ctx.set_materialize_grads(False)
        return log_probs, entropies

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropies: Tensor | None) -> tuple[Any, ...]:
        hidden, weight, bias, targets, lse, entropies = ctx.saved_tensors
        (scale, softcap, temperature), chunk, kernel = ctx.options
        if grad_log_probs is None and grad_entropies is None:
            return (None,) * 9
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if wants_bias else None
        grad_log_probs = torch.zeros_like(lse) if grad_log_probs is None else grad_log_probs.contiguous()
        # The gradient of the logits is `factor * inner`, the factor one number a token.
        factors = torch.full_like(lse, scale / temperature)[:, None]
        if grad_entropies is None:
            factors *= -grad_log_probs[:, None]
        else:
            grad_entropies = grad_entropies.contiguous()
        kept, ctx.logits = ctx.logits, None
        logits = _buffer(hidden, weight, chunk) if kept is None else kept
        work = kernel(Head(weight=weight, bias=bias, scale=scale, softcap=softcap), temperature, logits)
        for start in reversed(range(0, len(hidden), chunk)):
            part = slice(start, start + chunk)
            factor = factors[part]
            inner = work.gradient(
                hidden[part], targets[part], lse[part], None if entropies is None else entropies[part],
                grad_log_probs[part], None if grad_entropies is None else grad_entropies[part],
                computed=kept is not None,
            )  # fmt: skip
            kept = None
            if grad_hidden is not None:
                grad_hidden[part] = (inner @ weight) * factor
            if grad_weight is not None:
                _add_product(grad_weight, inner.t(), (hidden[part] * factor).to(weight.dtype))
            if grad_bias is not None:
                _add_product(grad_bias[:, None], inner.t(), factor.to(weight.dtype))
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *(None,) * 6,
        )


def _own(targets: Tensor, start: int, rows: int) -> Tensor:
    """Targets among the tokens that a rank has, counted from its first one; -1 for those of other ranks."""
    own = targets - start
    return torch.where((own >= 0) & (own < rows), own, -1)


def _joined(
    ranks: VocabularyRanks, targets: Tensor, log_probs: Tensor, lse: Tensor, entropies: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Log-probabilities, logsumexp and entropies over the vocabulary, from those over each rank's part of it."""
    largest = ranks.max(lse)
    whole = largest + ranks.sum((lse - largest).exp()).log()
    chosen = ranks.sum(torch.where(targets < 0, 0.0, log_probs + lse))
    joined = None if entropies is None else whole - ranks.sum((lse - whole).exp() * (lse - entropies))
    return chosen - whole, whole, joined


def _buffer(hidden: Tensor, weight: Tensor, chunk: int) -> Tensor:
    """Memory for the logits of one chunk."""
    return hidden.new_empty(min(chunk, len(hidden)), len(weight), dtype=torch.float32)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add a product to a float32 matrix."""
    if left.dtype == torch.float32:
        total.addmm_(left, right)
    elif _widens(total.device, left.dtype):
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total += left @ right


@functools.cache
def _widens(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a product of half precision matrices can be had, and added, in float32: asked of the device."""
    part, total = torch.ones(16, 16, dtype=dtype, device=device), torch.ones(16, 16, device=device)
    try:
        torch.addmm(total, part, part, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):  # torch, or its build for the device, has no such product
        return False
    return bool((total == 17).all())
