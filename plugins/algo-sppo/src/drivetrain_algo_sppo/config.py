"""The settings of SPPO."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from drivetrain.config import AlgorithmConfig, Problem

if TYPE_CHECKING:
    from drivetrain.config import RunConfig
    from drivetrain.seam.registry import Registry


class SPPOConfig(AlgorithmConfig):
    """The section ``algorithm`` when its name is ``sppo``."""

    group_size: int = Field(5, ge=2, description="Samples of a prompt; each is compared with all of them.")
    preference: Literal["bradley_terry", "order", "win_rate"] = Field(
        "bradley_terry",
        description="The win probability of one sample over another: bradley_terry, a sigmoid of the difference of "
        "their scores; order, 1, 1/2 or 0 as the score is higher, equal or lower; win_rate: none, a score is the win "
        "probability over the policy itself.",
    )
    preference_temperature: float = Field(1.0, gt=0, description="What bradley_terry divides differences by.")
    eta: float = Field(1e3, gt=0, description="Step of the game: log-ratios are fitted to eta (P - 1/2), in nats.")
    train: Literal["best_worst", "all"] = Field("best_worst", description="The samples of a prompt that are learnt.")
    labels: Literal["soft", "hard"] = Field(
        "soft", description="P of the best and the worst sample: soft, as estimated; hard: 1 and 0, if they differ."
    )
    epochs: int = Field(1, ge=1, description="Passes over an iteration's samples.")

    def samples_per_prompt(self) -> int:
        return self.group_size

    def check(self, run: RunConfig, registry: Registry) -> Iterable[Problem]:
        if self.preference != "bradley_terry" and self.departs("preference_temperature"):
            yield Problem(key="preference_temperature", what=f"preference {self.preference} does not read it",
                          mend="remove it, or set preference to bradley_terry")  # fmt: skip
        if self.labels == "hard" and self.train == "all":
            yield Problem(key="labels", what="hard labels are of the best and the worst sample, but all are learnt",
                          mend="set train to best_worst, or labels to soft")  # fmt: skip
        if run.rollout is not None and run.rollout.temperature == 0:
            yield Problem(key="group_size", what="greedy sampling draws every sample of a prompt alike",
                          mend="raise rollout.temperature above 0")  # fmt: skip
