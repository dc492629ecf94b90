"""The coefficient of the KL divergence in the reward: fixed, or steered towards a target."""

from __future__ import annotations

MAX_ERROR = 0.2  # of the relative error that one update answers to


class KLController:
    """The controller of Ziegler et al. 2019 (arXiv:1909.08593). After a batch of n completions of mean divergence d,

        e = clip(d / target - 1, -0.2, 0.2)        value <- value (1 + e n / horizon)

    Without a target the value stays as it is.
    """

    def __init__(self, value: float, target: float | None = None, horizon: float = 1.0) -> None:
        self.value, self.target, self.horizon = value, target, horizon

    def update(self, kl: float, completions: int) -> None:
        """Answer to a batch; ``kl`` is the mean over completions of the sum over tokens, in nats."""
        if self.target is not None:
            error = min(max(kl / self.target - 1, -MAX_ERROR), MAX_ERROR)
            self.value *= 1 + error * completions / self.horizon
