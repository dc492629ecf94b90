from __future__ import annotations

from typing import Any

import pytest
from judge_server import Reply

from drivetrain import SampleError
from drivetrain_judges.configs import LLMJudgeConfig
from drivetrain_judges.endpoint import JudgeError
from drivetrain_judges.score import LLMJudge
from drivetrain_judges.texts import NoAnswer, find_verdict


def judge(url: str, **settings: Any) -> LLMJudge:
    return LLMJudge(LLMJudgeConfig(name="llm_judge", base_url=url, model="m", **settings))


def by_response(text: str, _: int) -> Reply:
    """The default template; a response of N is worth N."""
    response = text.split("[Response]\n")[1].split("\n")[0]
    return Reply(f"Score: 1 is low.\nScore: {response}")


def test_numbers_become_scores_in_order(serve, sample) -> None:
    url, server = serve(by_response)
    numbers = ["7", "0", "10", "2.5", "7"]
    scores = judge(url, correct_above=7)([sample(number) for number in numbers])
    assert [score.value for score in scores] == pytest.approx([0.7, 0, 1, 0.25, 0.7])
    assert [score.correct for score in scores] == [False, False, True, False, False]
    assert len(server.asked) == 4  # the two that are equal are asked once
    scores = judge(url, scale=(-1, 3))([sample("5")])
    assert scores[0].value == 1 and scores[0].correct is None
    assert judge(url, scale=None)([sample("5")])[0].value == 5
    assert judge(url)([]) == []


def test_what_is_sent(serve, sample) -> None:
    url, server = serve(lambda text, _: Reply('{"note": {"score": 9}} so {"score": 3, "why": "x"}'))
    reward = judge(
        url, template='{prompt}|{response}|{answer}|{minimum}-{maximum}|{"score": N}', json_key="score", maximum=4,
        system_prompt="Be strict.", temperature=0.5, max_tokens=7, extra_body={"top_k": 3, "seed": 1},
    )  # fmt: skip
    chat = [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}]
    samples = [
        sample("r {prompt} {x}", answer="a", prompt="<user>Q"),
        sample("r", answer="", prompt="<user>Q", messages=chat[1:]),
        sample("r", answer="a", prompt="<system>S<user>Q", messages=chat),
    ]
    assert [score.value for score in reward(samples)] == [0.75] * 3
    texts = {asked.text for asked in server.asked}
    assert texts == {
        '<user>Q|r {prompt} {x}|a|0-4|{"score": N}', 'Q|r||0-4|{"score": N}',
        'system: S\n\nuser: Q|r|a|0-4|{"score": N}',
    }  # fmt: skip
    for asked in server.asked:
        assert asked.body["messages"][0] == {"role": "system", "content": "Be strict."}
        rest = {name: value for name, value in asked.body.items() if name != "messages"}
        assert rest == {"model": "m", "temperature": 0.5, "max_tokens": 7, "top_k": 3, "seed": 1}
    url, server = serve(by_response)
    judge(url, temperature=None, max_tokens=None)([sample("1")])
    assert set(server.asked[0].body) == {"model", "messages"} and len(server.asked[0].body["messages"]) == 1


def test_a_sample_without_the_answer_that_the_template_shows(serve, sample) -> None:
    url, server = serve(by_response)
    with pytest.raises(SampleError) as raised:
        judge(url, template="{response} {answer}")([sample("1", answer="a"), sample("2")])
    assert raised.value.index == 1 and isinstance(raised.value.__cause__, NoAnswer) and not server.asked


@pytest.mark.parametrize(
    "garbage", ["", None, "no number", "Score: eleven", "Score: 11", "Score: -0.1", "Score: 5\nScore: 99"]
)
def test_a_verdict_that_cannot_be_read_is_asked_for_again(serve, sample, garbage: str | None) -> None:
    url, server = serve(lambda text, number: Reply(garbage) if number < 2 else Reply("Score: 4"))
    assert judge(url)([sample("r")])[0].value == 0.4
    assert len(server.asked) == 3
    url, server = serve(lambda text, number: Reply(garbage))
    with pytest.raises(SampleError) as raised:
        judge(url, verdict_retries=1)([sample("r")])
    assert raised.value.index == 0 and len(server.asked) == 2
    said = str(raised.value.__cause__)
    assert isinstance(raised.value.__cause__, JudgeError)
    assert said.startswith(f"no verdict can be read from {url}/chat/completions in 2 answers, the last")
    assert repr(" ".join((garbage or "").split())) in said and said.endswith("mend template, pattern or json_key")


def test_a_long_verdict_is_shortened_and_a_cut_one_says_so(serve, sample) -> None:
    url, _ = serve(lambda text, number: Reply("start " + "x" * 5000 + " end", finish_reason="length"))
    with pytest.raises(SampleError) as raised:
        judge(url, verdict_retries=0)([sample("r")])
    said = str(raised.value.__cause__)
    assert len(said) < 400 and "'start x" in said and "x end'" in said and said.endswith("raise max_tokens")


@pytest.mark.parametrize(
    ("said", "verdict"),
    [
        ('{"score": 1} {"score": "2"}', "2"),
        ('```json\n{"a": "}{", "score": 3}\n```', "3"),
        ('{"score": 1} {"other": 2} {', "1"),
        ("{score: 1}", None),
        ('["score"]', None),
        ('{"score": null}', "None"),
    ],
)
def test_the_last_json_object_with_the_key(said: str, verdict: str | None) -> None:
    config = LLMJudgeConfig(name="x", base_url="http://h", model="m", json_key="score")
    assert find_verdict(said, config) == verdict


@pytest.mark.parametrize(
    ("said", "verdict"),
    [("**Score:** 7", "7"), ("Score: **8.5**/10", "8.5"), ("Score: 1 then\nScore:\n2", "2"), ("score 5", None)],
)
def test_the_default_pattern(said: str, verdict: str | None) -> None:
    assert find_verdict(said, LLMJudgeConfig(name="x", base_url="http://h", model="m")) == verdict
