"""What drivetrain-judges offers."""

from __future__ import annotations

from collections.abc import Iterable

from drivetrain import RewardSpec, hookimpl


@hookimpl
def drivetrain_rewards() -> Iterable[RewardSpec]:
    yield RewardSpec(
        name="llm_judge",
        summary="The score that a language model gives, over an OpenAI-compatible endpoint.",
        factory="drivetrain_judges.score:LLMJudge",
        config="drivetrain_judges.configs:LLMJudgeConfig",
    )
    yield RewardSpec(
        name="llm_preference",
        summary="The win rate among the samples of a prompt, by a language model that compares them in pairs.",
        factory="drivetrain_judges.preference:LLMPreference",
        config="drivetrain_judges.configs:LLMPreferenceConfig",
    )
