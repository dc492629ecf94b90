"""The settings of GRPO."""

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

ADVANTAGE_KEYS = ("normalize_by_std", "epsilon")
POLICY_LOSS_KEYS = ("clip_low", "clip_high", "clip_dual", "aggregation", "scale")


class GRPOConfig(AlgorithmConfig):
    """The section ``algorithm`` when its name is ``grpo``."""

    group_size: int = Field(8, ge=2, description="Samples of a prompt; rewards are compared within them.")
    advantage: str = Field("grpo", description="Advantage estimator, by name.")
    normalize_by_std: bool = Field(True, description="Divide by the standard deviation of the group.")
    epsilon: float = Field(1e-6, gt=0, description="Added to that standard deviation.")
    advantage_args: dict[str, Any] = Field({}, description="Further options of the estimator.")
    policy_loss: str = Field("clip", description="Policy loss, by name.")
    clip_low: float = Field(0.2, ge=0, description="Ratios below 1 - clip_low are clipped.")
    clip_high: float = Field(0.2, ge=0, description="Ratios above 1 + clip_high are clipped.")
    clip_dual: float | None = Field(None, gt=1, description="Bound of the loss at negative advantages, as a ratio.")
    aggregation: Aggregation = Field("token-mean", description="How losses of tokens become one number.")
    scale: float | None = Field(None, gt=0, description="Constant length that seq-mean-token-sum-norm divides by.")
    policy_loss_args: dict[str, Any] = Field({}, description="Further options of the policy loss.")
    kl_coef: float = Field(0.0, ge=0, description="Weight of the KL divergence from the reference policy; 0: none.")
    kl_kind: KLKind = Field("k3", description="Estimator of the KL divergence.")
    kl_in: Literal["loss", "reward"] = Field("loss", description="Where the KL divergence is charged.")
    entropy_coef: float = Field(0.0, ge=0, description="Weight of the entropy bonus.")
    epochs: int = Field(1, ge=1, description="Passes over a batch.")
    old_log_probs: Literal["recompute", "rollout"] = Field(
        "recompute", description="Log-probs that ratios start from: the trainer's before the update, or the rollout's."
    )

    def roles(self) -> tuple[str, ...]:
        return ("actor", "ref") if self.kl_coef > 0 else ("actor",)

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
        if self.aggregation == "seq-mean-token-sum-norm" and self.scale is None:
            yield Problem(key="scale", what="seq-mean-token-sum-norm divides by a constant length that is not set",
                          mend="set algorithm.scale, for example to rollout.max_response_tokens")  # fmt: skip
        if self.aggregation != "seq-mean-token-sum-norm" and self.scale is not None:
            yield Problem(key="scale", what=f"aggregation {self.aggregation} does not divide by a constant length",
                          mend="remove algorithm.scale, or set aggregation to seq-mean-token-sum-norm")  # fmt: skip
        for key in ("kl_kind", "kl_in"):
            if self.kl_coef == 0 and self.departs(key):
                yield Problem(key=key, what="is not read while kl_coef is 0", mend=f"set kl_coef, or remove {key}")
        if self.old_log_probs == "rollout" and run.rollout is not None:
            if run.rollout.truncates_distribution:
                yield Problem(key="old_log_probs", what="the rollout's log-probs are of a distribution that top-k, "
                              "top-p or min-p cut down, not the policy's", mend="use recompute")  # fmt: skip
            if run.rollout.temperature == 0:
                yield Problem(key="old_log_probs", what="greedy samples have no log-probs to start from",
                              mend="raise rollout.temperature")  # fmt: skip
        if run.rollout is not None and run.rollout.temperature == 0:
            yield Problem(key="group_size", what="greedy sampling draws every sample of a group alike",
                          mend="raise rollout.temperature above 0")  # fmt: skip
