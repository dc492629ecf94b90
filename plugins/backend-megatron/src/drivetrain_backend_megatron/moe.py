"""The balance of experts: what it is, and losses that keep it.

megatron-core scales these losses for gradients that are divided by counts of tokens in the end, in ways that differ
between its releases. Here gradients are sums over micro-batches and ranks, so a loss is divided by the tokens of the
whole update from the start.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from drivetrain.metrics import Max, Mean, Metric


class Balance:
    r"""The choices of a model's routers in an update, and their losses.

    With :math:`f_i` the share of a micro-batch's choices that fall on expert i, :math:`P_i` the mean of the router's
    probability of i over its tokens, and E experts, the balance loss of a layer is :math:`E \sum_i f_i P_i` (Fedus et
    al. 2021, arXiv:2101.03961, eq. 4), and 1 where all experts are alike. The z-loss is the mean over tokens of the
    square of the router's log-sum-exp (Zoph et al. 2022, arXiv:2202.08906, eq. 5). The update has ``aux_coeff`` and
    ``z_coeff`` times the sums of these over layers, each the mean over micro-batches weighted by their tokens: all
    tokens that are read count, and no padding. A micro-batch is that of all ranks of context parallelism.
    """

    def __init__(self, layers: int, experts: int, *, aux_coeff: float, z_coeff: float, device: torch.device) -> None:
        self.aux_coeff, self.z_coeff = aux_coeff, z_coeff
        self.tokens = 0
        self._choices = torch.zeros(layers, experts, device=device)
        self._losses = torch.zeros(2, device=device)

    def begin(self, tokens: int) -> None:
        """Begin an update of so many tokens, over all ranks."""
        self.tokens = max(tokens, 1)
        self._choices.zero_()
        self._losses.zero_()

    def end(self) -> dict[str, Metric]:
        """End the update: a collective call of all ranks. The metrics are the same on each."""
        self.tokens = 0
        dist.all_reduce(self._choices)
        dist.all_reduce(self._losses)
        layers = len(self._choices)
        shares = self._choices / self._choices.sum(1, keepdim=True).clamp(min=1)
        metrics: dict[str, Metric] = {"busiest_expert": Max(float(shares.max()))}
        for name, coeff, total in zip(("balance_loss", "router_z_loss"), (self.aux_coeff, self.z_coeff), self._losses):
            if coeff:
                metrics[name] = Mean(float(total) / layers, 1)
        return metrics

    def loss(self, layer: int, logits: Tensor, chosen: Tensor, real: Tensor, group: Any) -> Tensor | None:
        """This rank's part of a layer's losses on a micro-batch; None without any.

        Args:
            layer: counted from 0.
            logits: ``(tokens, experts)`` of the router.
            chosen: ``(tokens, experts)`` whether a token goes to an expert.
            real: ``(tokens,)`` whether a token is not padding.
            group: the ranks that share the micro-batch.
        """
        choices = (chosen & real[:, None]).sum(0).float()
        self._choices[layer] += choices
        loss = None
        if self.aux_coeff:
            dist.all_reduce(choices, group=group)
            probability = (logits.float().softmax(-1) * real[:, None]).sum(0)
            balance = len(choices) * (choices * probability).sum() / choices.sum().clamp(min=1) / self.tokens
            self._losses[0] += balance.detach()
            loss = self.aux_coeff * balance
        if self.z_coeff:
            squares = (logits.float().logsumexp(-1).square() * real).sum() / self.tokens
            self._losses[1] += squares.detach()
            loss = self.z_coeff * squares + (0 if loss is None else loss)
        return loss


class Router(TopKRouter):  # type: ignore[misc]
    """megatron-core's router, whose choices the options' ``balance`` sees while an update computes gradients."""

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Probabilities and choices of experts, ``(tokens, experts)``.

        Args:
            logits: ``(tokens, 1, experts)`` of this rank.
            padding_mask: ``(tokens, 1)`` whether a token is padding; of all ranks of tensor parallelism where
                megatron-core has not split it.
        """
        probabilities, chosen = super().routing(logits)
        balance: Balance = self.config.balance
        if not (torch.is_grad_enabled() and balance.tokens):
            return probabilities, chosen
        assert padding_mask is not None
        real = ~padding_mask.flatten()
        if len(real) != len(chosen):
            real = real.chunk(self.tp_group.size())[self.tp_group.rank()]
        loss = balance.loss(self.layer_number - 1, logits.flatten(0, 1), chosen, real, self.tp_cp_group)
        if loss is not None:
            probabilities = _Attached.apply(probabilities, loss)
        return probabilities, chosen


class _Attached(torch.autograd.Function):
    """A tensor whose backward pass is that of a loss, too."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, loss: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return gradient, gradient.new_ones((), dtype=torch.float32)
