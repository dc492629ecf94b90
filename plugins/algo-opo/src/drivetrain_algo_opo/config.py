"""The settings of OPO."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pydantic import Field

from drivetrain.config import AlgorithmConfig, Problem
from drivetrain.config.policy_gradient import Aggregation

if TYPE_CHECKING:
    from drivetrain.config import RunConfig
    from drivetrain.seam.registry import Registry


class OPOConfig(AlgorithmConfig):
    """The section ``algorithm`` when its name is ``opo``."""

    group_size: int = Field(8, ge=2, description="Samples of a prompt, whose rewards make the baseline.")
    aggregation: Aggregation = Field("seq-mean-token-sum", description="How losses of tokens become one number.")
    scale: float | None = Field(None, gt=0, description="Constant length that seq-mean-token-sum-norm divides by.")

    def samples_per_prompt(self) -> int:
        return self.group_size

    def check(self, run: RunConfig, registry: Registry) -> Iterable[Problem]:
        if run.actor.mini_batch_prompts not in (None, run.data.batch_prompts):
            yield Problem(key="name", what="OPO is exactly on-policy: a batch is good for one update, but "
                          f"actor.mini_batch_prompts={run.actor.mini_batch_prompts} makes several of "
                          f"data.batch_prompts={run.data.batch_prompts}",
                          mend="remove actor.mini_batch_prompts, or choose another algorithm")  # fmt: skip
        if (self.aggregation == "seq-mean-token-sum-norm") != (self.scale is not None):
            yield Problem(key="scale", what="seq-mean-token-sum-norm, and no other aggregation, divides by a constant "
                          "length", mend="set both, or neither; scale may be rollout.max_response_tokens")  # fmt: skip
        if run.rollout is not None and (run.rollout.temperature == 0 or run.rollout.truncates_distribution):
            yield Problem(key="name", what="OPO learns from samples of the policy itself, not of a distribution that "
                          "temperature 0, top-k, top-p or min-p cut down",
                          mend="raise rollout.temperature above 0, and remove top_k, top_p and min_p")  # fmt: skip
