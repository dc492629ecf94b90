"""Weights that correct for tokens sampled by another policy than the one that is trained."""

from __future__ import annotations

from torch import Tensor

from drivetrain.numerics.masked import fill_masked, masked_sum

LEVELS = ("token", "sequence")


def truncated_weights(log_ratio: Tensor, mask: Tensor, level: str = "token", threshold: float = 2.0) -> Tensor:
    """Truncated importance weights, (batch, response), exactly 0 where masked. Detached.

        token     w_it = min(exp(l_it), threshold)
        sequence  w_it = min(exp(sum_t m_it l_it), threshold), one weight for the row

    `log_ratio` l (batch, response) = log-prob of the trained policy - log-prob of the policy that sampled, in nats. The
    result is finite for any l. Ionides 2008 (Truncated Importance Sampling, J. Comput. Graph. Stat. 17);
    Espeholt et al. 2018 (arXiv:1802.01561). ValueError: unknown `level`, `threshold` not positive.
    """
    if level not in LEVELS:
        raise ValueError(f"unknown importance level {level!r}; choose from {', '.join(LEVELS)}")
    if not threshold > 0:
        raise ValueError(f"threshold must be positive; got {threshold}")
    log_ratio = fill_masked(log_ratio.detach(), mask)
    if level == "sequence":
        log_ratio = masked_sum(log_ratio, mask, dim=-1).unsqueeze(-1).expand(mask.shape)
    weights = log_ratio.exp().clamp(max=threshold)  # an overflow to inf is cut as well
    return fill_masked(weights, mask)
