"""What drivetrain-tasks offers."""

from __future__ import annotations

from collections.abc import Iterable

from drivetrain import DatasetSpec, RewardSpec, hookimpl


@hookimpl
def drivetrain_datasets() -> Iterable[DatasetSpec]:
    yield DatasetSpec(
        name="reasoning_gym",
        summary="A procedural task of reasoning-gym, by seed.",
        factory="drivetrain_tasks.gym_dataset:ReasoningGymDataset",
        config="drivetrain_tasks.configs:ReasoningGymConfig",
    )
    yield DatasetSpec(
        name="parquet",
        summary="Prompts from Parquet files.",
        factory="drivetrain_tasks.tables:ParquetDataset",
        config="drivetrain_tasks.configs:ParquetConfig",
    )
    yield DatasetSpec(
        name="csv",
        summary="Prompts from a CSV file.",
        factory="drivetrain_tasks.tables:CsvDataset",
        config="drivetrain_tasks.configs:CsvConfig",
    )
    yield DatasetSpec(
        name="huggingface",
        summary="Prompts from a Hugging Face dataset (needs drivetrain-tasks[hub]).",
        factory="drivetrain_tasks.hub:HuggingFaceDataset",
        config="drivetrain_tasks.configs:HuggingFaceConfig",
    )


@hookimpl
def drivetrain_rewards() -> Iterable[RewardSpec]:
    yield RewardSpec(
        name="reasoning_gym",
        summary="The verifier of the reasoning-gym task that the prompt is from.",
        factory="drivetrain_tasks.gym_reward:ReasoningGymReward",
        config="drivetrain_tasks.configs:ReasoningGymRewardConfig",
    )
    yield RewardSpec(
        name="gsm8k",
        summary="One for the right final number.",
        factory="drivetrain_tasks.gsm8k:GSM8KReward",
        config="drivetrain_tasks.configs:GSM8KRewardConfig",
    )
    yield RewardSpec(
        name="math_verify",
        summary="One for an expression equal to the answer.",
        factory="drivetrain_tasks.math_answers:MathVerifyReward",
        config="drivetrain_tasks.configs:MathVerifyRewardConfig",
    )
    yield RewardSpec(
        name="code",
        summary="One for a Python program that passes the tests.",
        factory="drivetrain_tasks.code_reward:CodeReward",
        config="drivetrain_tasks.configs:CodeRewardConfig",
    )
    yield RewardSpec(
        name="format",
        summary="One for a response that matches a pattern.",
        factory="drivetrain_tasks.shape:FormatReward",
        config="drivetrain_tasks.configs:FormatRewardConfig",
    )
    yield RewardSpec(
        name="length",
        summary="A penalty that grows linearly beyond a soft limit of tokens.",
        factory="drivetrain_tasks.shape:LengthReward",
        config="drivetrain_tasks.configs:LengthRewardConfig",
    )
