"""What is computed from the logits of a chunk of tokens, between the matrix products before and after it."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from drivetrain import UserError

if TYPE_CHECKING:
    from drivetrain_backend_common.log_probs import Head


class LogitKernel(ABC):
    """The elementwise part of log-probabilities and their gradient, for one pass over the chunks.

    Args:
        head: makes logits from hidden states.
        temperature: logits are divided by it.
        memory: ``(chunk, vocabulary)`` in float32, for the logits of one chunk at a time.
    """

    def __init__(self, head: Head, temperature: float, memory: Tensor) -> None:
        self.head = head
        self.temperature = temperature
        self.memory = memory

    @abstractmethod
    def statistics(
        self, hidden: Tensor, targets: Tensor, log_probs: Tensor, lse: Tensor, entropies: Tensor | None
    ) -> None:
        """Write the log-probability of each target, logsumexp(z) and, unless it is None, the entropy: ``(tokens,)``.

        It leaves in ``memory`` what :meth:`gradient` can go on with.
        """

    @abstractmethod
    def gradient(
        self, hidden: Tensor, targets: Tensor, lse: Tensor, entropies: Tensor | None, grad_log_probs: Tensor,
        grad_entropies: Tensor | None, *, computed: bool,
    ) -> Tensor:  # fmt: skip
        """The gradient of the products ``x``, ``(tokens, vocabulary)`` in the dtype of the weight, less a factor.

        A target of -1 is none of these tokens. ``lse`` and ``entropies`` are of the distribution that the targets
        belong to, which may have more tokens than these.

        Without gradients of entropies it is that of ``-log p(y)`` for each token; with them, that of the weighted sum
        of both outputs, of which both weights are given. A factor ``scale / temperature`` is left out.

        Args:
            computed: whether ``memory`` holds what :meth:`statistics` left for these tokens.
        """


class Chunked(LogitKernel):
    """PyTorch's operations, on any device.

    A second float32 tensor of ``(chunk, vocabulary)`` exists with entropies, or with the gradient of a soft cap.
    """

    def __init__(self, head: Head, temperature: float, memory: Tensor) -> None:
        super().__init__(head, temperature, memory)
        self._second: Tensor | None = None

    def statistics(
        self, hidden: Tensor, targets: Tensor, log_probs: Tensor, lse: Tensor, entropies: Tensor | None
    ) -> None:
        z = self.head.logits(hidden, self.temperature, out=self.memory[: len(hidden)])
        chosen = z.gather(1, targets[:, None])
        log_p = torch.log_softmax(z, dim=-1, out=z)
        log_p_chosen = log_p.gather(1, targets[:, None])
        log_probs.copy_(log_p_chosen[:, 0])
        lse.copy_((chosen - log_p_chosen)[:, 0])
        if entropies is not None:
            torch.sum(torch.exp(log_p, out=self._spare(len(z))).mul_(log_p), dim=-1, out=entropies).neg_()

    def gradient(
        self, hidden: Tensor, targets: Tensor, lse: Tensor, entropies: Tensor | None, grad_log_probs: Tensor,
        grad_entropies: Tensor | None, *, computed: bool,
    ) -> Tensor:  # fmt: skip
        log_p, y, hit = self.memory[: len(hidden)], targets[:, None].clamp(min=0), (targets >= 0)[:, None]
        if not computed:
            self.head.logits(hidden, self.temperature, out=log_p).sub_(lse[:, None])
        if grad_entropies is None:
            inner = log_p.exp_()
            inner.scatter_add_(1, y, -hit.to(inner.dtype))
        else:
            assert entropies is not None
            inner = torch.add(log_p, entropies[:, None], out=self._spare(len(y))).mul_(-grad_entropies[:, None])
            inner -= grad_log_probs[:, None]
            inner *= log_p.exp_()
            inner.scatter_add_(1, y, grad_log_probs[:, None] * hit)
        if self.head.softcap is not None:
            unused = self._spare(len(y)) if grad_entropies is None else log_p
            bent = self.head.logits(hidden, out=unused).div_(self.head.softcap)
            inner.addcmul_(inner, bent.square_(), value=-1)
        return inner.to(self.head.weight.dtype)

    def _spare(self, tokens: int) -> Tensor:
        if self._second is None:
            self._second = torch.empty_like(self.memory)
        return self._second[:tokens]


def logit_kernel(name: str | None, device: torch.device) -> type[LogitKernel]:
    """The kernel of a name in ``log_prob_kernel``, or the one that suits the device.

    Raises:
        drivetrain.UserError: when the device or the environment has no Triton.
    """
    runs = device.type == "cuda" and importlib.util.find_spec("triton") is not None
    if name == "triton" and not runs:
        raise UserError(f"Triton does not run on {device.type} here", where="backend.log_prob_kernel",
                        mend="remove it; it takes a device of torch's type cuda, and the package triton, which torch"
                             " brings for such devices")  # fmt: skip
    if name == "chunked" or not runs:
        return Chunked
    from drivetrain_backend_common.triton_kernel import Triton

    return Triton
