"""The settings of my-algo: the section ``algorithm`` of a config."""

from __future__ import annotations

from pydantic import Field

from drivetrain.config import AlgorithmConfig


class MyAlgoConfig(AlgorithmConfig):
    """The section ``algorithm`` when its name is ``my-algo``."""

    group_size: int = Field(8, ge=2, description="Samples of a prompt.")

    def samples_per_prompt(self) -> int:
        return self.group_size
