"""The config models of what core itself offers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from drivetrain.config.base import DatasetConfig, RewardConfig


class RecordConfig(DatasetConfig):
    """A dataset of records, and which of their keys are what; ``a.b`` is the key ``b`` of the record at ``a``."""

    prompt_key: str = Field("prompt", description="Key of the prompt: text, or a list of chat messages.")
    answer_key: str | None = Field("answer", description="Key of the reference; null: there is none.")
    response_key: str | None = Field(
        None, description="Key of a text to imitate; of a preference pair, the better one."
    )
    rejected_key: str | None = Field(None, description="Key of the worse response of a preference pair.")
    data_source: str | None = Field(None, description="Name of the source in metrics. Omitted: the last part of path.")
    limit: int | None = Field(None, gt=0, description="Take the first records only.")


class JsonlConfig(RecordConfig):
    """The dataset ``jsonl``."""

    path: Path = Field(description="File with one JSON object a line.")


class ExactMatchConfig(RewardConfig):
    """The reward ``exact_match``."""

    strip: bool = Field(True, description="Leave white space at both ends out of the comparison.")
    ignore_case: bool = Field(False, description="Compare without regard to case.")
    require_stop: bool = Field(True, description="A response that was cut off or aborted is wrong.")


class FunctionRewardConfig(RewardConfig):
    """The reward ``function``."""

    path: str = Field(description="package.module:function, or ./file.py:function from where drivetrain is started.")
    args: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the function.")

    @field_validator("path")
    @classmethod
    def _absolute(cls, path: str) -> str:
        """A file's path is made absolute, so that a run can be continued from another folder."""
        file, colon, function = path.rpartition(":")
        return f"{Path(file).absolute()}{colon}{function}" if file.endswith(".py") else path

    def inputs(self) -> Iterator[tuple[str, Path]]:
        file = self.path.rpartition(":")[0]
        if file.endswith(".py"):
            yield "path", Path(file)
