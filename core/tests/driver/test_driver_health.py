"""Warnings that a run goes wrong."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from drivetrain.config import HealthConfig
from drivetrain.driver.health import Health

CALM = {"reward": 0.5, "accuracy": 0.5, "entropy": 0.4, "kl": 0.02, "approx_kl": 0.001, "response_tokens": 100.0,
        "truncated": 0.1, "groups_without_signal": 0.3, "rollout_mismatch": 0.001, "rollout_mismatch_max": 0.05,
        "rollout_ppl_ratio": 1.0, "rollout_ess": 0.999}  # fmt: skip
APART = {"rollout_mismatch": 0.25, "rollout_mismatch_max": 4.5, "rollout_ppl_ratio": 1.02, "rollout_ess": 0.9}


def said(health: Health, steps: int, **other: float) -> list[str]:
    """What is said in so many steps of the same numbers; averages are over five steps."""
    numbers = {f"train/{name}": value for name, value in {**CALM, **other}.items()}
    return [text for _ in range(steps) for text in health.watch(numbers)]


TROUBLES = [
    ({"entropy": 0.03}, "entropy collapse", ["0.03 nats", "0.4 in the first steps", "entropy bonus"]),
    ({"kl": 3.0}, "KL blow-up", ["1.21 nats a token from the reference", "0.02 in the first"]),
    ({"approx_kl": 1.5}, "KL blow-up", ["1.2 nats a token within one step's updates"]),
    ({"response_tokens": 180.0, "truncated": 0.8}, "length explosion", ["164 tokens after 100", "66% of them"]),
    ({"groups_without_signal": 0.97, "accuracy": 0.02}, "dead prompts", ["97% of the comp", "2% of the", "hard"]),
    ({"groups_without_signal": 0.97, "accuracy": 0.99}, "dead prompts", ["99% of the answers are right", "too easy"]),
    ({"groups_without_signal": 0.97, "accuracy": float("nan")}, "dead prompts", ["no reward judges right and wrong"]),
    (APART, "rollout mismatch", ["0.0508 nats a token", "4.5 at most", "98% of", "after 0.001 in the first", "late"]),
]  # fmt: skip


@pytest.mark.parametrize("trouble, sign, words", TROUBLES)
def test_each_sign_is_said_once_with_its_cause(trouble: dict[str, float], sign: str, words: Sequence[str]) -> None:
    health = Health(HealthConfig())
    assert said(health, 20) == []
    [text] = said(health, 20, **trouble)
    assert text.startswith(f"{sign}: ") and all(word in text for word in words)
    assert said(health, 20) == [] and len(said(health, 20, **trouble)) == 1  # again, after it had gone


def test_one_odd_step_is_no_sign() -> None:
    health = Health(HealthConfig())
    said(health, 10)
    assert said(health, 1, entropy=0.001, response_tokens=130.0, truncated=1.0, groups_without_signal=1.0) == []


def test_nothing_is_said_before_there_are_steps_to_average() -> None:
    assert said(Health(HealthConfig()), 4, kl=9.0, groups_without_signal=1.0) == []


def test_a_mismatch_is_said_in_the_first_step_with_what_causes_one() -> None:
    health = Health(HealthConfig())
    [text] = said(health, 1, **APART)
    words = ["rollout mismatch", "0.25 nats a token", "4.5 at most", "worth 90%", "dtypes", "kernels", "temperature"]
    assert all(word in text for word in words) and said(health, 9, **APART) == []


def test_a_mismatch_of_few_tokens_is_seen_by_the_sample_size() -> None:
    [text] = said(Health(HealthConfig()), 1, rollout_mismatch=0.01, rollout_mismatch_max=9.0, rollout_ess=0.125)
    assert text.startswith("rollout mismatch: ") and "worth 12% of as many draws" in text and "9 at most" in text


@pytest.mark.parametrize("ppl_ratio, one_sided", [(1.105, True), (1.05, False), (0.95, False)])
def test_a_distribution_that_is_cut_down_is_told_from_engines_that_differ(ppl_ratio: float, one_sided: bool) -> None:
    """0.1 nats a token: exp(0.1) is the ratio of perplexities if the rollout finds every token likelier."""
    apart = {"rollout_mismatch": 0.1, "rollout_ppl_ratio": ppl_ratio, "rollout_ess": 0.95}
    [text] = said(Health(HealthConfig(), cuts=True), 1, **apart)
    assert ("one-sided, as top_k, top_p or min_p make it" in text) == one_sided == ("dtypes" not in text)
    assert "dtypes" in said(Health(HealthConfig()), 1, **apart)[0]  # where nothing is cut down
    assert "dtypes" in said(Health(HealthConfig(), cuts=True), 1, **{**apart, "rollout_ess": 0.1})[0]


def test_longer_answers_that_end_by_themselves_are_welcome() -> None:
    health = Health(HealthConfig())
    said(health, 10)
    assert said(health, 10, response_tokens=400.0) == []


def test_metrics_that_a_run_lacks_are_not_missed() -> None:
    health = Health(HealthConfig())
    assert [text for _ in range(9) for text in health.watch({"train/reward": 1.0})] == []


@pytest.mark.parametrize("limit, trouble", [
    ("entropy_below", {"entropy": 0.0}), ("kl_above", {"kl": 9.0, "approx_kl": 9.0}),
    ("length_above", {"response_tokens": 900.0, "truncated": 1.0}),
    ("dead_prompts_above", {"groups_without_signal": 1.0}),
    ("mismatch_above", {"rollout_mismatch": 9.0}), ("ess_below", {"rollout_ess": 0.01}),
])  # fmt: skip
def test_a_warning_can_be_turned_off(limit: str, trouble: dict[str, float]) -> None:
    health = Health(HealthConfig(**{limit: None}))
    assert said(health, 10) + said(health, 10, **trouble) == []


def test_state_survives_a_restart() -> None:
    whole, part = Health(HealthConfig()), Health(HealthConfig())
    assert said(whole, 7) == said(part, 7) == []
    again = Health(HealthConfig())
    again.load_state_dict(json.loads(json.dumps(part.state_dict())))
    assert said(again, 6, entropy=0.01) == said(whole, 6, entropy=0.01) != []
