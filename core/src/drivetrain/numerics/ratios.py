"""What is estimated from the log-ratio of two policies: their KL divergence, and weights that correct for sampling."""

from __future__ import annotations

import torch
from torch import Tensor

from drivetrain.numerics.masked import fill_masked, masked_mean, masked_sum

KL_KINDS = ("k1", "k2", "k3", "abs")
LEVELS = ("token", "sequence")
MAX_LOG_RATIO = 20.0  # exp(20) = 4.9e8: far outside what related models give, finite in float32 and bfloat16


def kl_penalty(log_probs: Tensor, ref_log_probs: Tensor, kind: str) -> Tensor:
    """The KL(policy || reference) estimate of each token, (batch, response), with d = log pi_ref(a|s) - log pi(a|s):

        k1   -d                 unbiased, may be negative
        k2   d^2 / 2            biased, never negative, low variance
        k3   exp(d) - 1 - d     unbiased, never negative
        abs  |d|                a penalty on distance, no KL estimate

    J. Schulman, Approximating KL Divergence (2020), joschu.net/blog/kl-approx.html; k3 is equation 4 of DeepSeekMath
    (arXiv:2402.03300). In k3, d is clamped from above at 20, beyond which the gradient is 0. ValueError: unknown kind.
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


def truncated_weights(log_ratio: Tensor, mask: Tensor, level: str = "token", threshold: float = 2.0) -> Tensor:
    """Truncated importance weights, (batch, response), exactly 0 where masked. Detached.

        token     w_it = min(exp(l_it), threshold)
        sequence  w_it = min(exp(sum_t m_it l_it), threshold), one weight for the row

    `log_ratio` l (batch, response) = log-prob of the trained policy - log-prob of the policy that sampled, in nats.
    Ionides 2008 (Truncated Importance Sampling, J. Comput. Graph. Stat. 17); Espeholt et al. 2018 (arXiv:1802.01561).
    ValueError: unknown `level`, `threshold` not positive.
    """
    if level not in LEVELS:
        raise ValueError(f"unknown importance level {level!r}; choose from {', '.join(LEVELS)}")
    if not threshold > 0:
        raise ValueError(f"threshold must be positive; got {threshold}")
    log_ratio = fill_masked(log_ratio.detach(), mask)
    if level == "sequence":
        log_ratio = masked_sum(log_ratio, mask, dim=-1).unsqueeze(-1).expand(mask.shape)
    return fill_masked(log_ratio.exp().clamp(max=threshold), mask)  # an overflow to inf is cut as well


def band_mask(log_ratio: Tensor, mask: Tensor, level: str, low: float, high: float) -> Tensor:
    """Which tokens keep their weight, (batch, response) bool, False where masked, with l as above:

        token     k_it = m_it and low <= exp(l_it) <= high
        sequence  k_it = m_it and low <= exp(sum_t m_it l_it / n_i) <= high, n_i = sum_t m_it: a whole row or nothing

    By tokens it is IcePop, Ling Team 2025 (arXiv:2510.18855), which has bounds 0.5 and 5 and the ratio as the weight.
    The geometric mean of a row does not grow with its length: GSPO (arXiv:2507.18071), equation 7, of other policies.
    ValueError: unknown `level`.
    """
    if level not in LEVELS:
        raise ValueError(f"unknown importance level {level!r}; choose from {', '.join(LEVELS)}")
    log_ratio = fill_masked(log_ratio.detach(), mask)
    ratio = (masked_mean(log_ratio, mask, dim=-1).unsqueeze(-1) if level == "sequence" else log_ratio).exp()
    return (low <= ratio) & (ratio <= high) & (mask != 0)


def effective_sample_size(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """(sum w)^2 / (n sum w^2), w = exp(l) of the n tokens that the mask selects: how many draws of the trained
    policy they are worth, as a share of them, in (0, 1]; 0 without a token. Scalar, detached.

    Kong, Liu and Wong 1994 (J. Am. Stat. Assoc. 89). Weights are relative to the largest, so that none overflows.
    """
    log_ratio = fill_masked(log_ratio.detach().double(), mask, -torch.inf)
    weights = (log_ratio - log_ratio.amax().clamp(min=torch.finfo(log_ratio.dtype).min)).exp()
    return weights.sum().square() / ((mask != 0).sum() * weights.square().sum()).clamp(min=1)
