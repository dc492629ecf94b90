"""The config models. Nothing heavy is imported here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from drivetrain import DatasetConfig, RecordConfig, RewardConfig, Section


def _checked_pattern(pattern: str | None, *, groups: int = 0) -> str | None:
    if pattern is not None:
        try:
            found = re.compile(pattern).groups
        except re.error as error:
            raise ValueError(f"no regular expression: {error}") from error
        if found < groups:
            raise ValueError("the pattern has no group (...) that marks the part to take")
    return pattern


# -- datasets -------------------------------------------------------------------------------------------------------


class GymSection(Section):
    """Some items of a task."""

    seed: int = Field(ge=0, description="Seed of the items.")
    size: int = Field(gt=0, description="How many items.")


class ReasoningGymConfig(DatasetConfig):
    """The dataset ``reasoning_gym``."""

    task: str = Field(description="Name of the task, such as chain_sum.")
    size: int = Field(gt=0, description="How many items are drawn, those that disjoint_from leaves out counted.")
    seed: int = Field(ge=0, description="Seed of the items.")
    task_args: dict[str, Any] = Field(default_factory=dict, description="Settings of the task.")
    prompt_pattern: str | None = Field(
        None, description="Regular expression; the first group of its first match is the prompt. Omitted: all of it."
    )
    strip_spaces: bool = Field(False, description="Remove all white space from prompts.")
    disjoint_from: GymSection | None = Field(
        None, description="Leave out every prompt that occurs in this other set of the same task and settings."
    )

    @field_validator("prompt_pattern")
    @classmethod
    def _pattern_has_group(cls, pattern: str | None) -> str | None:
        return _checked_pattern(pattern, groups=1)

    @field_validator("task_args")
    @classmethod
    def _own_keys(cls, args: dict[str, Any]) -> dict[str, Any]:
        if taken := {"seed", "size"} & set(args):
            raise ValueError(f"set {', '.join(sorted(taken))} beside task_args, not in it")
        return args


class ParquetConfig(RecordConfig):
    """The dataset ``parquet``."""

    path: Path = Field(description="Parquet file, or a folder of them.")


class CsvConfig(RecordConfig):
    """The dataset ``csv``. Every value is text; an answer of 007 stays 007."""

    path: Path = Field(description="CSV file in UTF-8 whose first line names the columns.")
    delimiter: str = Field(",", min_length=1, max_length=1, description="Character between values.")


class HuggingFaceConfig(RecordConfig):
    """The dataset ``huggingface``."""

    path: str = Field(description="Name on the hub, or a folder, saved with save_to_disk or not.")
    subset: str | None = Field(None, description="Configuration of a dataset on the hub that has several.")
    split: str = Field("train", description="Split of the dataset.")

    def inputs(self) -> Iterator[tuple[str, Path]]:
        if Path(self.path).exists():
            yield "path", Path(self.path)


# -- rewards --------------------------------------------------------------------------------------------------------


class JudgedConfig(RewardConfig):
    """A reward that judges whether the answer is right."""

    require_stop: bool = Field(True, description="A response that was cut off or aborted is wrong.")


class ReasoningGymRewardConfig(JudgedConfig):
    """The reward ``reasoning_gym``."""

    task: str | None = Field(None, description="Name of the task. Omitted: the one that the sample's dataset names.")
    task_args: dict[str, Any] = Field(default_factory=dict, description="Settings of that task.")
    answer_pattern: str | None = Field(
        None, description="Regular expression; the first group of its last match is judged. Omitted: the response."
    )
    sample_timeout_s: float = Field(5.0, gt=0, description="A response that takes longer to judge is wrong.")

    @field_validator("answer_pattern")
    @classmethod
    def _pattern_has_group(cls, pattern: str | None) -> str | None:
        return _checked_pattern(pattern, groups=1)

    @model_validator(mode="after")
    def _args_belong_to_a_task(self) -> ReasoningGymRewardConfig:
        if self.task_args and self.task is None:
            raise ValueError("task_args is set without task")
        return self


class GSM8KRewardConfig(JudgedConfig):
    """The reward ``gsm8k``."""

    mode: Literal["strict", "flexible"] = Field(
        "strict", description="strict: the number after the last ####; flexible: the last number of the response."
    )


class MathVerifyRewardConfig(JudgedConfig):
    """The reward ``math_verify``."""

    sample_timeout_s: float = Field(5.0, gt=0, description="A response that takes longer to judge is wrong.")


class CodeRewardConfig(JudgedConfig):
    """The reward ``code``."""

    timeout_s: float = Field(600.0, gt=0, description="A call for one batch that takes longer stops the run.")
    kind: Literal["asserts", "stdio"] = Field(
        "asserts", description="asserts: statements that run after the program; stdio: pairs of input and output."
    )
    tests_key: str | None = Field(
        None, description="Key of the tests among the sample's other keys, a.b for b in a. Omitted: the answer."
    )
    extract: Literal["block", "response"] = Field(
        "block", description="block: the program is the last fenced block of Python; response: all of the response."
    )
    score: Literal["all", "fraction"] = Field(
        "all", description="all: 1 if every test passes, else 0; fraction: the share of tests that pass."
    )
    time_limit_s: float = Field(5.0, gt=0, description="A program that takes longer is ended.")
    memory_mb: int = Field(1024, gt=0, description="Address space of each process of a program, in MiB.")
    output_kb: int = Field(1024, gt=0, description="A program that prints more is ended, in KiB.")
    file_mb: int = Field(16, gt=0, description="Longest file that a program may write, in MiB.")
    max_processes: int = Field(16, gt=0, description="A program that has more processes at once is ended.")
    network: Literal["deny", "allow"] = Field(
        "deny", description="deny: programs have neither the network nor other processes of their user in reach."
    )
    max_concurrency: int | None = Field(
        None, gt=0, description="How many programs run at once. Omitted: as many as there are CPU cores."
    )


class FormatRewardConfig(RewardConfig):
    """The reward ``format``."""

    pattern: str = Field(description="Regular expression; the dot matches line ends too.")
    match: Literal["whole", "any"] = Field("whole", description="Match the whole response, or any part of it.")

    @field_validator("pattern")
    @classmethod
    def _pattern_compiles(cls, pattern: str) -> str | None:
        return _checked_pattern(pattern)


class LengthRewardConfig(RewardConfig):
    """The reward ``length``."""

    soft_limit_tokens: int = Field(ge=0, description="Up to this many response tokens nothing is taken off.")
    hard_limit_tokens: int = Field(gt=0, description="From this many response tokens on the reward is -1.")

    @model_validator(mode="after")
    def _limits_in_order(self) -> LengthRewardConfig:
        if self.soft_limit_tokens >= self.hard_limit_tokens:
            raise ValueError("soft_limit_tokens must be less than hard_limit_tokens")
        return self
