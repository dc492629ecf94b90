"""The settings of DAPO."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from drivetrain.config import PolicyGradientConfig, Problem

if TYPE_CHECKING:
    from drivetrain.config import RunConfig
    from drivetrain.seam.registry import Registry


class DAPOConfig(PolicyGradientConfig):
    """The section ``algorithm`` when its name is ``dapo``."""

    advantage_keys: ClassVar[tuple[str, ...]] = ("normalize_by_std", "epsilon")

    group_size: int = Field(16, ge=2, description="Samples of a prompt.")
    advantage: str = Field("grpo", description="Advantage estimator, by name.")
    normalize_by_std: bool = Field(True, description="Divide by the standard deviation of the group.")
    epsilon: float = Field(1e-6, gt=0, description="Added to that standard deviation.")
    clip_high: float = Field(0.28, ge=0, description="Ratios above 1 + clip_high are clipped.")
    filter_by: Literal["accuracy", "score"] = Field(
        "accuracy", description="Learn from prompts whose samples are right and wrong, or differ in score."
    )
    round_prompts: int | None = Field(
        None, gt=0, description="Prompts of each further round of a step. Omitted: data.batch_prompts."
    )
    max_rounds: int = Field(10, ge=1, description="Rounds of a step, the first one counted.")
    too_few: Literal["error", "fewer"] = Field(
        "error",
        description="If they yield too few prompts: stop, or learn from as many whole mini-batches as there are.",
    )
    overlong_penalty: float = Field(1.0, ge=0, description="What a response of full length costs; 0: no such penalty.")
    overlong_cache_tokens: int | None = Field(
        None, gt=0,
        description="Over how many last tokens of rollout.max_response_tokens the penalty rises. Omitted: a fifth.",
    )  # fmt: skip
    mask_truncated: bool = Field(False, description="Leave responses that were cut off by length out of the loss.")

    def check(self, run: RunConfig, registry: Registry) -> Iterable[Problem]:
        yield from super().check(run, registry)
        cache = self.overlong_cache_tokens
        if cache is None:
            return
        if self.overlong_penalty == 0:
            yield Problem(key="overlong_cache_tokens", what="is not read while overlong_penalty is 0",
                          mend="raise overlong_penalty, or remove it")  # fmt: skip
        if run.rollout is not None and cache > run.rollout.max_response_tokens:
            yield Problem(key="overlong_cache_tokens", what=f"{cache} tokens are more than the longest response of "
                          f"{run.rollout.max_response_tokens}", mend="lower it")  # fmt: skip
