"""The settings of PPO."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from drivetrain.config import PolicyGradientConfig, Problem
from drivetrain.config.policy_gradient import KLKind

if TYPE_CHECKING:
    from drivetrain.config import RunConfig
    from drivetrain.seam.registry import Registry


class PPOConfig(PolicyGradientConfig):
    """The section ``algorithm`` when its name is ``ppo``."""

    advantage_keys: ClassVar[tuple[str, ...]] = ("gamma", "lam")
    kl_keys: ClassVar[tuple[str, ...]] = ("kl_kind", "kl_controller", "target_kl", "kl_horizon")
    supplies: ClassVar[tuple[str, ...]] = ("reward_baselines", "values")

    group_size: int = Field(1, ge=1, description="Samples of a prompt.")
    advantage: str = Field("gae", description="Advantage estimator, by name.")
    gamma: float = Field(1.0, ge=0, le=1, description="Discount of a token.")
    lam: float = Field(0.95, ge=0, le=1, description="Weight of longer returns, from bias (0) to variance (1).")
    clip_value: float = Field(0.5, ge=0, description="Values further than this from the old ones are clipped.")
    critic_warmup_steps: int = Field(0, ge=0, description="Steps of the run in which the critic alone learns.")
    kl_coef: float = Field(0.0, ge=0, description="Weight, at first, of the KL divergence in the reward; 0: none.")
    kl_kind: KLKind = Field("k1", description="Estimator of the KL divergence.")
    kl_controller: Literal["fixed", "adaptive"] = Field("fixed", description="Whether kl_coef follows target_kl.")
    target_kl: float = Field(6.0, gt=0, description="KL divergence of a completion that kl_coef steers to, in nats.")
    kl_horizon: float = Field(10000.0, gt=0, description="Completions over which kl_coef reacts; more react slower.")

    def roles(self) -> tuple[str, ...]:
        return (*super().roles(), "critic")

    def check(self, run: RunConfig, registry: Registry) -> Iterable[Problem]:
        yield from super().check(run, registry)
        if self.kl_coef > 0 and self.kl_controller == "fixed":
            for key in ("target_kl", "kl_horizon"):
                if self.departs(key):
                    yield Problem(key=key, what="is not read while kl_controller is fixed",
                                  mend=f"change that, or remove {key}")  # fmt: skip
        if self.critic_warmup_steps >= run.trainer.steps:
            yield Problem(key="critic_warmup_steps", what="the policy never learns: the run has "
                          f"{run.trainer.steps} steps", mend="lower it, or raise trainer.steps")  # fmt: skip
