"""The settings that algorithms have in common which weigh log-probs of samples with advantages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from drivetrain.config.base import AlgorithmConfig, Problem
from drivetrain.config.checks import check_options, chosen_options

if TYPE_CHECKING:
    from drivetrain.config.models import RunConfig
    from drivetrain.seam.registry import Registry
    from drivetrain.seam.specs import AdvantageEstimatorSpec, PolicyLossSpec

Aggregation = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
KLKind = Literal["k1", "k2", "k3", "abs"]
Bounds = tuple[Annotated[float, Field(gt=0, le=1)], Annotated[float, Field(ge=1)]]  # of a ratio


class PolicyGradientConfig(AlgorithmConfig):
    """Base of the section ``algorithm`` of algorithms derived from :class:`drivetrain.PolicyGradient`.

    A subclass gives ``advantage`` a default, and fields of its own.

    Attributes:
        advantage_keys: keys of the section that are options of advantage estimators.
        policy_loss_keys: keys that are options of policy losses.
        kl_keys: keys that are read only where ``kl_coef`` is above 0.
        supplies: columns that the algorithm has for estimators beyond rewards and mask.
    """

    advantage_keys: ClassVar[tuple[str, ...]] = ()
    policy_loss_keys: ClassVar[tuple[str, ...]] = ("clip_low", "clip_high", "clip_dual", "aggregation", "scale")
    kl_keys: ClassVar[tuple[str, ...]] = ("kl_kind",)
    supplies: ClassVar[tuple[str, ...]] = ("reward_baselines",)

    group_size: int = Field(8, ge=1, description="Samples of a prompt.")
    advantage: str = Field(description="Advantage estimator, by name.")
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
    entropy_coef: float = Field(0.0, ge=0, description="Weight of the entropy bonus.")
    epochs: int = Field(1, ge=1, description="Passes over a batch.")
    old_log_probs: Literal["recompute", "rollout"] = Field(
        "recompute", description="Log-probs that ratios start from: the trainer's before the update, or the rollout's."
    )
    rollout_is: Literal["auto", "none", "token", "sequence"] = Field(
        "auto",
        description="Weigh the loss by the truncated ratio of the trainer's to the rollout's probability before the"
        " update, of each token or of its whole sequence. auto: of each token where the engines differ, none where they"
        " are one module or the policy loss reads no weights.",
    )
    rollout_is_threshold: float = Field(2.0, gt=0, description="Where that ratio is truncated.")
    rollout_band: Bounds | None = Field(
        None, description="Tokens whose ratio is not in [low, high], low <= 1 <= high, get weight 0, as in IcePop."
    )
    rollout_reject: Bounds | None = Field(
        None, description="Sequences whose geometric mean of ratios is not in [low, high] get weight 0."
    )

    def roles(self) -> tuple[str, ...]:
        return ("actor", "ref") if self.kl_coef > 0 else ("actor",)

    def required_capabilities(self) -> tuple[str, ...]:
        return ("backend.log_probs",) if self.old_log_probs == "recompute" or self.kl_coef > 0 else ()

    def samples_per_prompt(self) -> int:
        return self.group_size

    def advantage_options(self) -> dict[str, Any]:
        """Keyword arguments of the estimator: those of the section that it takes, and the further ones."""
        return chosen_options(self, field="advantage", hook="advantage_estimators", own=self.advantage_keys,
                              extra=self.advantage_args)  # fmt: skip

    def policy_loss_options(self) -> dict[str, Any]:
        """Keyword arguments of the policy loss: those of the section that it takes, and the further ones."""
        return chosen_options(self, field="policy_loss", hook="policy_losses", own=self.policy_loss_keys,
                              extra=self.policy_loss_args)  # fmt: skip

    @property
    def bands(self) -> dict[str, Bounds]:
        """Bounds of the ratio that are set, at the level ``token`` or ``sequence``."""
        both = {"token": self.rollout_band, "sequence": self.rollout_reject}
        return {level: bounds for level, bounds in both.items() if bounds is not None}

    def correction(self, shared: bool) -> str:
        """What ``rollout_is`` comes to, by whether rollout and trainer are one module; ``auto`` with a band or a
        rejection is ``token`` in any case."""
        from drivetrain.seam.registry import get_registry

        if self.rollout_is != "auto":
            return self.rollout_is
        reads = self.old_log_probs == "recompute" and self._weighted(get_registry())
        return "token" if reads and (self.bands or not shared) else "none"

    def _weighted(self, registry: Registry) -> bool:
        """Whether the policy loss reads weights; one that is not there is complained of elsewhere."""
        spec: PolicyLossSpec | None = registry.find("policy_losses", self.policy_loss).spec
        return spec is None or spec.weighted

    def check(self, run: RunConfig, registry: Registry) -> Iterable[Problem]:
        yield from check_options(self, registry, field="advantage", hook="advantage_estimators",
                                 own=self.advantage_keys, extra=self.advantage_args,
                                 extra_field="advantage_args")  # fmt: skip
        yield from check_options(self, registry, field="policy_loss", hook="policy_losses", own=self.policy_loss_keys,
                                 extra=self.policy_loss_args, extra_field="policy_loss_args")  # fmt: skip
        yield from self._check_estimator(registry)
        yield from self._check_correction(registry)
        if self.aggregation == "seq-mean-token-sum-norm" and self.scale is None:
            yield Problem(key="scale", what="seq-mean-token-sum-norm divides by a constant length that is not set",
                          mend="set algorithm.scale, for example to rollout.max_response_tokens")  # fmt: skip
        if self.aggregation != "seq-mean-token-sum-norm" and self.scale is not None:
            yield Problem(key="scale", what=f"aggregation {self.aggregation} does not divide by a constant length",
                          mend="remove algorithm.scale, or set aggregation to seq-mean-token-sum-norm")  # fmt: skip
        for key in self.kl_keys:
            if self.kl_coef == 0 and self.departs(key):
                yield Problem(key=key, what="is not read while kl_coef is 0", mend=f"set kl_coef, or remove {key}")
        if run.rollout is not None and run.rollout.temperature == 0:
            yield Problem(key="name", what="greedy sampling draws every sample alike, and tries nothing that could turn"
                          " out better", mend="raise rollout.temperature above 0")  # fmt: skip
        elif run.rollout is not None and self.old_log_probs == "rollout" and run.rollout.truncates_distribution:
            yield Problem(key="old_log_probs", what="the rollout's log-probs are of a distribution that top-k, "
                          "top-p or min-p cut down, not the policy's", mend="use recompute")  # fmt: skip

    def _check_estimator(self, registry: Registry) -> Iterable[Problem]:
        spec: AdvantageEstimatorSpec | None = registry.find("advantage_estimators", self.advantage).spec
        if spec is None:
            return
        if lacking := sorted(set(spec.needs) - set(self.supplies)):
            yield Problem(key="advantage", what=f"{self.advantage!r} needs {' and '.join(lacking)}, which algorithm "
                          f"{self.name!r} does not have", mend="choose another estimator, or an algorithm that has "
                          "them" + " (a critic's values: ppo)" * ("values" in lacking))  # fmt: skip
        if spec.compares_samples and self.group_size == 1:
            yield Problem(key="group_size", what=f"{self.advantage!r} compares the samples of a prompt, of which there "
                          "is one", mend="raise algorithm.group_size to 2 or more")  # fmt: skip

    def _check_correction(self, registry: Registry) -> Iterable[Problem]:
        what = mend = ""
        if self.old_log_probs == "rollout":
            what, mend = ("compares the trainer's log-probs before the update with the rollout's, but old_log_probs "
                          "takes the rollout's for both", "use old_log_probs: recompute")  # fmt: skip
        elif not self._weighted(registry):
            what, mend = f"policy loss {self.policy_loss!r} does not read importance weights", "choose another loss"
        for key in ("rollout_is", "rollout_band", "rollout_reject"):
            if what and getattr(self, key) not in ("auto", "none", None):
                yield Problem(key=key, what=what, mend=f"{mend}, or remove {key}")
        if self.departs("rollout_is_threshold") and (self.rollout_is == "none" or (what and self.rollout_is == "auto")):
            yield Problem(key="rollout_is_threshold", what="is not read while rollout_is is, or comes to, none",
                          mend="set rollout_is to token or sequence, or remove it")  # fmt: skip
