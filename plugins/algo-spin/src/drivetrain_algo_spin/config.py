"""The settings of SPIN."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import Field

from drivetrain import Problem, RunConfig
from drivetrain.seam.registry import Registry
from drivetrain_algo_dpo.config import PairConfig, missing_keys


class SPINConfig(PairConfig):
    """The section ``algorithm`` when its name is ``spin``."""

    beta: float = Field(0.1, gt=0, description="Strength of the tie to the opponent; lambda of the paper.")
    epochs: int = Field(1, ge=1, description="Passes over the pairs of an iteration.")

    def samples_per_prompt(self) -> int:
        return 2

    def check(self, run: RunConfig, registry: Registry) -> Iterable[Problem]:
        yield from missing_keys(run, "response_key")
        if run.rollout is not None and run.rollout.temperature == 0:
            yield Problem(key="name", what="the opponent's responses are to be drawn from it; greedy ones are not",
                          mend="raise rollout.temperature above 0")  # fmt: skip
