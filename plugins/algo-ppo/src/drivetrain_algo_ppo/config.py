"""The settings of PPO."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from drivetrain.config import AlgorithmConfig, Problem, check_options, chosen_options

if TYPE_CHECKING:
    from drivetrain.config import RunConfig
    from drivetrain.seam.registry import Registry

Aggregation = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
KLKind = Literal["k1", "k2", "k3", "abs"]

ADVANTAGE_KEYS = ("gamma", "lam")
POLICY_LOSS_KEYS = ("clip_low", "clip_high", "clip_dual", "aggregation", "scale")
READ_WITH_KL = ("kl_kind", "kl_controller", "target_kl", "kl_horizon")


class PPOConfig(AlgorithmConfig):
    """The section ``algorithm`` when its name is ``ppo``."""

    group_size: int = Field(1, ge=1, description="Samples of a prompt.")
    advantage: str = Field("gae", description="Advantage estimator, by name.")
    gamma: float = Field(1.0, ge=0, le=1, description="Discount of a token.")
    lam: float = Field(0.95, ge=0, le=1, description="Weight of longer returns, from bias (0) to variance (1).")
    advantage_args: dict[str, Any] = Field({}, description="Further options of the estimator.")
    policy_loss: str = Field("clip", description="Policy loss, by name.")
    clip_low: float = Field(0.2, ge=0, description="Ratios below 1 - clip_low are clipped.")
    clip_high: float = Field(0.2, ge=0, description="Ratios above 1 + clip_high are clipped.")
    clip_dual: float | None = Field(None, gt=1, description="Bound of the loss at negative advantages, as a ratio.")
    aggregation: Aggregation = Field("token-mean", description="How losses of tokens become one number.")
    scale: float | None = Field(None, gt=0, description="Constant length that seq-mean-token-sum-norm divides by.")
    policy_loss_args: dict[str, Any] = Field({}, description="Further options of the policy loss.")
    clip_value: float = Field(0.5, ge=0, description="Values further than this from the old ones are clipped.")
    critic_warmup_steps: int = Field(0, ge=0, description="Steps of the run in which the critic alone learns.")
    kl_coef: float = Field(0.0, ge=0, description="Weight, at first, of the KL divergence in the reward; 0: none.")
    kl_kind: KLKind = Field("k1", description="Estimator of the KL divergence.")
    kl_controller: Literal["fixed", "adaptive"] = Field("fixed", description="Whether kl_coef follows target_kl.")
    target_kl: float = Field(6.0, gt=0, description="KL divergence of a completion that kl_coef steers to, in nats.")
    kl_horizon: float = Field(10000.0, gt=0, description="Completions over which kl_coef reacts; more react slower.")
    entropy_coef: float = Field(0.0, ge=0, description="Weight of the entropy bonus.")
    epochs: int = Field(1, ge=1, description="Passes over a batch.")
    old_log_probs: Literal["recompute", "rollout"] = Field(
        "recompute", description="Log-probs that ratios start from: the trainer's before the update, or the rollout's."
    )

    def roles(self) -> tuple[str, ...]:
        return ("actor", "critic", "ref") if self.kl_coef > 0 else ("actor", "critic")

    def required_capabilities(self) -> tuple[str, ...]:
        return ("backend.log_probs",) if self.old_log_probs == "recompute" or self.kl_coef > 0 else ()

    def samples_per_prompt(self) -> int:
        return self.group_size

    def advantage_options(self) -> dict[str, Any]:
        """Keyword arguments of the estimator: those of the section that it takes, and the further ones."""
        return chosen_options(self, field="advantage", hook="advantage_estimators", own=ADVANTAGE_KEYS,
                              extra=self.advantage_args)  # fmt: skip

    def policy_loss_options(self) -> dict[str, Any]:
        """Keyword arguments of the policy loss: those of the section that it takes, and the further ones."""
        return chosen_options(self, field="policy_loss", hook="policy_losses", own=POLICY_LOSS_KEYS,
                              extra=self.policy_loss_args)  # fmt: skip

    def check(self, run: RunConfig, registry: Registry) -> Iterable[Problem]:
        yield from check_options(self, registry, field="advantage", hook="advantage_estimators", own=ADVANTAGE_KEYS,
                                 extra=self.advantage_args, extra_field="advantage_args")  # fmt: skip
        yield from check_options(self, registry, field="policy_loss", hook="policy_losses", own=POLICY_LOSS_KEYS,
                                 extra=self.policy_loss_args, extra_field="policy_loss_args")  # fmt: skip
        if (self.aggregation == "seq-mean-token-sum-norm") != (self.scale is not None):
            yield Problem(key="scale", what="seq-mean-token-sum-norm, and no other aggregation, divides by a constant "
                          "length", mend="set both, or neither; scale may be rollout.max_response_tokens")  # fmt: skip
        for key in READ_WITH_KL if self.kl_coef == 0 else READ_WITH_KL[2:] if self.kl_controller == "fixed" else ():
            if self.departs(key):
                why = "kl_coef is 0" if self.kl_coef == 0 else "kl_controller is fixed"
                yield Problem(key=key, what=f"is not read while {why}", mend=f"change that, or remove {key}")
        if self.critic_warmup_steps >= run.trainer.steps:
            yield Problem(key="critic_warmup_steps", what="the policy never learns: the run has "
                          f"{run.trainer.steps} steps", mend="lower it, or raise trainer.steps")  # fmt: skip
        if run.rollout is not None and run.rollout.temperature == 0:
            yield Problem(key="name", what="greedy sampling tries nothing that could turn out better",
                          mend="raise rollout.temperature above 0")  # fmt: skip
        elif run.rollout is not None and self.old_log_probs == "rollout" and run.rollout.truncates_distribution:
            yield Problem(key="old_log_probs", what="the rollout's log-probs are of a distribution that top-k, "
                          "top-p or min-p cut down, not the policy's", mend="use recompute")  # fmt: skip
