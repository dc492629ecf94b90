"""Log-probabilities and entropies of tokens from hidden states, some tokens' logits at a time.

With hidden state h, head W and b, target y, scale s, soft cap c and temperature T:

    x = h W^T + b        z = s x / T,  or with a cap  c tanh(s x / c) / T
    log p(y) = z_y - logsumexp(z)        H = logsumexp(z) - sum_v p_v z_v

    d log p(y) / dz_v = [v = y] - p_v        dH / dz_v = -p_v (log p_v + H)

The backward pass computes the logits of all chunks but the last a second time, so that logits of
``(tokens, vocabulary)`` never exist. It begins with the last chunk, whose log-probabilities the forward pass left, and
computes the others in the same memory: at most one float32 tensor of ``(chunk, vocabulary)`` exists, and a second one
for entropies and for the gradient of a soft cap. Weights of another dtype add one of theirs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear


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

    def logits(self, hidden: Tensor, temperature: float = 1.0, *, out: Tensor | None = None) -> Tensor:
        """``(tokens, vocabulary)`` in float32, divided by the temperature; in ``out`` where it is given.

        Not differentiable.
        """
        if self.weight.dtype != torch.float32:
            product = linear(hidden, self.weight, self.bias)
            logits = product.float() if out is None else out.copy_(product)
        elif self.bias is None:
            logits = torch.mm(hidden, self.weight.t(), out=out)
        else:
            logits = torch.addmm(self.bias, hidden, self.weight.t(), out=out)
        if self.softcap is not None:
            return logits.mul_(self.scale / self.softcap).tanh_().mul_(self.softcap / temperature)
        factor = self.scale / temperature
        return logits if factor == 1 else logits.mul_(factor)


def token_log_probs(
    hidden: Tensor, targets: Tensor, head: Head, *, temperature: float, chunk_tokens: int, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each target, and the entropy of the distribution it belongs to.

    Args:
        hidden: ``(tokens, hidden)``.
        targets: ``(tokens,)``.
        temperature: logits are divided by it.
        chunk_tokens: tokens whose logits exist at one time.
        entropy: whether to compute the second result; it is None otherwise.

    Returns:
        ``(tokens,)`` in float32 each, differentiable in hidden states, weight and bias.
    """
    log_probs, entropies = _TokenLogProbs.apply(
        hidden, head.weight, head.bias, targets, (head.scale, head.softcap, temperature), chunk_tokens, entropy
    )
    return log_probs, entropies


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, shape: Any, chunk: int,
        entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        scale, softcap, temperature = shape
        head = Head(weight=weight, bias=bias, scale=scale, softcap=softcap)
        log_probs = hidden.new_empty(len(hidden), dtype=torch.float32)
        entropies = torch.empty_like(log_probs) if entropy else None
        logits = _buffer(hidden, weight, chunk)
        spare = torch.empty_like(logits if entropy else logits[:0])
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            z = head.logits(hidden[part], temperature, out=logits[: len(hidden[part])])
            log_p = torch.log_softmax(z, dim=-1, out=z)
            log_probs[part] = log_p.gather(1, targets[part, None])[:, 0]
            if entropies is not None:
                torch.sum(torch.exp(log_p, out=spare[: len(log_p)]).mul_(log_p), dim=-1, out=entropies[part]).neg_()
        ctx.save_for_backward(hidden, weight, bias, targets, entropies)
        ctx.options = (shape, chunk)
        ctx.logits = logits if any(ctx.needs_input_grad[:3]) else None  # log-probabilities of the last chunk
        ctx.set_materialize_grads(False)
        return log_probs, entropies

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropies: Tensor | None) -> tuple[Any, ...]:
        hidden, weight, bias, targets, entropies = ctx.saved_tensors
        (scale, softcap, temperature), chunk = ctx.options
        if grad_log_probs is None and grad_entropies is None:
            return (None,) * 7
        head = Head(weight=weight, bias=bias, scale=scale, softcap=softcap)
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if wants_bias else None
        kept, ctx.logits = ctx.logits, None
        logits = _buffer(hidden, weight, chunk) if kept is None else kept
        spare = torch.empty_like(logits[:0] if grad_entropies is None and softcap is None else logits)
        for start in reversed(range(0, len(hidden), chunk)):
            part = slice(start, start + chunk)
            y, slope = targets[part, None], scale / temperature
            z = logits[: len(y)]
            if kept is None:
                head.logits(hidden[part], temperature, out=z)
            # The gradient of the logits is `factor * inner`, the factor one number a token.
            if grad_entropies is None:
                inner = torch.softmax(z, dim=-1, out=z) if kept is None else z.exp_()
                inner.scatter_add_(1, y, torch.full_like(y, -1, dtype=inner.dtype))
                factor = cast(Tensor, grad_log_probs)[part, None] * -slope
                unused = spare
            else:
                log_p = torch.log_softmax(z, dim=-1, out=z) if kept is None else z
                inner = torch.add(log_p, entropies[part, None], out=spare[: len(y)]).mul_(-grad_entropies[part, None])
                if grad_log_probs is not None:
                    inner -= grad_log_probs[part, None]
                inner *= log_p.exp_()
                if grad_log_probs is not None:
                    inner.scatter_add_(1, y, grad_log_probs[part, None])
                factor = inner.new_full((len(y), 1), slope)
                unused = logits
            kept = None
            if softcap is not None:
                bent = head.logits(hidden[part], out=unused[: len(y)]).div_(softcap)
                inner.addcmul_(inner, bent.square_(), value=-1)
            inner = inner.to(weight.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = (inner @ weight) * factor
            if grad_weight is not None:
                weighted = (hidden[part] * factor).to(weight.dtype)
                if weight.dtype == torch.float32:
                    grad_weight.addmm_(inner.t(), weighted)
                else:
                    grad_weight += inner.t() @ weighted
            if grad_bias is not None:
                grad_bias += (inner.t().float() @ factor)[:, 0]
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *(None,) * 4,
        )


def _buffer(hidden: Tensor, weight: Tensor, chunk: int) -> Tensor:
    """Memory for the logits of one chunk."""
    return hidden.new_empty(min(chunk, len(hidden)), len(weight), dtype=torch.float32)
