"""Judges among the rewards of a run, in the thread in which the driver calls them."""

from __future__ import annotations

import asyncio
import gc
import threading
import warnings
from typing import Any

import pytest
import torch
from judge_server import Reply

from drivetrain import DataProto, RewardError
from drivetrain.driver.rewarding import PanelReward, RewardPanel
from drivetrain_judges.configs import LLMJudgeConfig, LLMPreferenceConfig
from drivetrain_judges.preference import LLMPreference
from drivetrain_judges.score import LLMJudge


class Digits:
    """A tokenizer whose tokens are digits."""

    def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str:
        return "".join(map(str, tokens))


def batch() -> DataProto:
    """Two prompts with two samples each: 1 and 7, 9 and 3."""
    responses = torch.tensor([[1], [9], [7], [3]])
    texts = {
        "raw_prompt": ["p", "q", "p", "q"], "messages": [None] * 4, "uid": ["p", "q", "p", "q"], "answer": ["7"] * 4,
        "data_source": ["s"] * 4, "extra": [{}] * 4, "finish_reason": ["stop"] * 4,
    }  # fmt: skip
    return DataProto.from_dict({"responses": responses, "response_mask": torch.ones_like(responses)}, texts)


def answer(text: str, _: int) -> Reply:
    if "Response A" in text:
        a, b = (int(text.split(f"[Response {name}]\n")[1][0]) for name in "AB")
        return Reply("Verdict: A" if a > b else "Verdict: B")
    return Reply(f"Score: {text.split('[Response]')[1].strip()[0]}")


def rewards(url: str, **settings: Any) -> tuple[LLMJudge, LLMPreference]:
    where = {"base_url": url, "model": "m", **settings}
    return (
        LLMJudge(LLMJudgeConfig(name="llm_judge", correct_above=6, **where)),
        LLMPreference(LLMPreferenceConfig(name="llm_preference", **where)),
    )


def test_judges_and_a_rule_in_a_weighted_sum(serve) -> None:
    url, server = serve(answer)
    score, preference = rewards(url)
    panel = RewardPanel(
        [
            PanelReward(label="score", reward=score, weight=0.5),
            PanelReward(label="wins", reward=preference, weight=2.0),
            PanelReward(label="rule", reward=lambda samples: [s.response == s.answer for s in samples], weight=-1.0),
        ],
        Digits(),
    )
    for _ in range(2):  # two batches, each in a thread of its own
        scored = panel.score(batch())
        assert scored["reward/score"].tolist() == pytest.approx([0.1, 0.9, 0.7, 0.3])
        assert scored["reward/wins"].tolist() == [0.25, 0.75, 0.75, 0.25]
        assert scored["reward/rule"].tolist() == [0, 0, 1, 0]
        assert scored["scores"].tolist() == pytest.approx([0.55, 1.95, 0.85, 0.65])
        assert scored["correct"].tolist() == [0, 0, 1, 0]  # score and rule have to agree
    assert len(server.asked) == 2 * (4 + 4)


def test_a_failure_is_never_a_score(serve) -> None:
    url, _ = serve(lambda text, n: Reply(status=400, body="no") if "\n3" in text else answer(text, n))
    panel = RewardPanel([PanelReward(label="taste", reward=rewards(url)[0])], Digits())
    with pytest.raises(RewardError) as raised:
        panel.score(batch())
    said = str(raised.value)
    assert said.startswith(f"reward 'taste' raised JudgeError: {url}/chat/completions answered 400: 'no'")
    assert "prompt 'q', response '3', answer '7'" in said and "never counted as zero" in said


def test_a_batch_that_takes_too_long(serve) -> None:
    url, server = serve(lambda text, n: (server.ending.wait(20), Reply("Score: 1"))[1])
    panel = RewardPanel([PanelReward(label="taste", reward=rewards(url, max_retries=0)[0], timeout_s=0.5)], Digits())
    with pytest.raises(RewardError, match="took longer than timeout_s=0.5 for 4 samples"):
        panel.score(batch())


def test_connections_tasks_and_loop_are_closed(serve) -> None:
    url, server = serve(lambda text, n: Reply(status=400, body="no") if n == 20 else answer(text, n))
    reward = rewards(url)[0]
    loop = reward._endpoint._loop
    panel = RewardPanel([PanelReward(label="taste", reward=reward)], Digits())
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        for _ in range(5):
            panel.score(batch())
        with pytest.raises(RewardError):
            panel.score(batch())
        assert not asyncio.all_tasks(loop)
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("reward")]
        del reward, panel
        gc.collect()
    assert loop.is_closed()
