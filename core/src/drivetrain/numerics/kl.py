"""Estimators of KL(policy || reference) from the log-probs of tokens that the policy sampled."""

from __future__ import annotations

import torch
from torch import Tensor

KL_KINDS = ("k1", "k2", "k3", "abs")

MAX_LOG_RATIO = 20.0
"""exp(20) = 4.9e8: far outside what two related models give, and finite in float32 and bfloat16."""


def kl_penalty(log_probs: Tensor, ref_log_probs: Tensor, kind: str) -> Tensor:
    """The KL estimate of each token, shape of the inputs, (batch, response). With d = log pi_ref(a|s) - log pi(a|s):

        k1   -d                 unbiased, may be negative
        k2   d^2 / 2            biased, never negative, low variance
        k3   exp(d) - 1 - d     unbiased, never negative
        abs  |d|                a penalty on distance, no KL estimate

    From J. Schulman, Approximating KL Divergence (2020), joschu.net/blog/kl-approx.html; k3 is equation 4 of
    DeepSeekMath (arXiv:2402.03300). In k3, d is clamped from above at 20: beyond it the value stays exp(20) - 21 and
    the gradient is 0. The other kinds cannot overflow and are not clamped. Differentiable in both arguments.
    ValueError: unknown `kind`.
    """
    d = ref_log_probs - log_probs
    match kind:
        case "k1":
            return -d
        case "k2":
            return d.square() / 2
        case "k3":
            d = d.clamp(max=MAX_LOG_RATIO)
            return torch.expm1(d) - d  # expm1 keeps the digits that exp(d) - 1 loses near d = 0
        case "abs":
            return d.abs()
    raise ValueError(f"unknown KL kind {kind!r}; choose from {', '.join(KL_KINDS)}")
