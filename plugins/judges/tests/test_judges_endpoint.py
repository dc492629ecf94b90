"""Failures, limits and keys, against a real server."""

from __future__ import annotations

import json
import logging
import threading
import time
from typing import Any

import pytest
from judge_server import Asked, Reply

from drivetrain import SampleError
from drivetrain_judges.configs import LLMJudgeConfig
from drivetrain_judges.endpoint import JudgeError
from drivetrain_judges.score import LLMJudge

SOON = {"retry-after": "0.01"}
GOOD = Reply("Score: 5")


def judge(url: str, **settings: Any) -> LLMJudge:
    return LLMJudge(LLMJudgeConfig(name="llm_judge", base_url=url, model="m", **settings))


def failure(reward: LLMJudge, samples: list[Any]) -> tuple[int, str]:
    """The position of the sample at fault, and the text."""
    with pytest.raises(SampleError) as raised:
        reward(samples)
    assert isinstance(raised.value.__cause__, JudgeError)
    return raised.value.index, str(raised.value.__cause__)


def numbered(count: int, sample: Any) -> list[Any]:
    return [sample(f"response {number}") for number in range(count)]


# -- retries


@pytest.mark.parametrize("status", [408, 409, 429, 500, 503])
def test_what_may_pass_is_sent_again(serve, sample, status: int) -> None:
    url, server = serve(lambda text, number: Reply(status=status, headers=SOON) if number < 2 else GOOD)
    assert judge(url)([sample("r")])[0].value == 0.5
    assert [asked.body for asked in server.asked] == [server.asked[0].body] * 3


def test_retry_after_is_waited_for(serve, sample, monkeypatch: pytest.MonkeyPatch) -> None:
    waited = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr("openai._base_client.anyio.sleep", sleep)
    headers = [{"retry-after": "17"}, {}, {"retry-after": "3"}, {}]
    url, _ = serve(lambda text, n: Reply(status=429, headers=headers[n]) if n < len(headers) else GOOD)
    assert judge(url)([sample("r")])[0].value == 0.5
    assert waited[0] == 17 and waited[2] == 3
    assert 0.75 <= waited[1] <= 1 and 3 <= waited[3] <= 4  # exponential: 0.5 s doubled once, and thrice, less a quarter


@pytest.mark.parametrize(
    ("status", "requests", "mend"),
    [
        (400, 1, "mend model, max_tokens, temperature or extra_body"),
        (401, 1, "set api_key_env"),
        (404, 1, "mend base_url or model"),
        (422, 1, "mend model, max_tokens, temperature or extra_body"),
        (429, 3, "set requests_per_minute, lower max_concurrency, or see to the account's quota"),
        (503, 3, "see the server's log, or raise max_retries"),
    ],
)
def test_what_does_not_pass_names_endpoint_status_and_what_to_do(
    serve, sample, status: int, requests: int, mend: str
) -> None:
    body = json.dumps({"error": {"message": "that\nis why"}})
    url, server = serve(lambda text, n: Reply(status=status, headers=SOON, body=body) if "bad" in text else GOOD)
    index, said = failure(judge(url, max_retries=2), [sample("good"), sample("bad")])
    assert index == 1 and said.endswith(f"(max_retries=2); {mend}")
    assert said.startswith(f"{url}/chat/completions answered {status}: ") and "is why" in said
    assert sum("bad" in asked.text for asked in server.asked) == requests


def test_after_a_failure_no_more_is_asked(serve, sample) -> None:
    url, server = serve(lambda text, n: Reply(status=401, body="{}"))
    failure(judge(url, max_concurrency=2), numbered(50, sample))
    assert len(server.asked) <= 4


def test_a_silent_endpoint(serve, sample) -> None:
    url, server = serve(lambda text, n: (server.ending.wait(20), GOOD)[1] if n < 1 else GOOD)
    reward = judge(url, request_timeout_s=0.3, max_retries=1)
    assert reward([sample("r")])[0].value == 0.5  # the second request is answered
    url, server = serve(lambda text, n: (server.ending.wait(20), GOOD)[1])
    _, said = failure(judge(url, request_timeout_s=0.3, max_retries=1), [sample("r")])
    assert len(server.asked) == 2
    assert said.startswith(f"{url}/chat/completions was silent for request_timeout_s=0.3 (max_retries=1)")


def test_nobody_listens(sample) -> None:
    _, said = failure(judge("http://127.0.0.1:9/v1", max_retries=0), [sample("r")])
    assert said.startswith("http://127.0.0.1:9/v1/chat/completions cannot be reached: ") and "start the server" in said


@pytest.mark.parametrize(
    ("body", "kind"),
    [("<html>", "text/html"), ("{", "application/json"), ('{"error": "<html>"}', "application/json"),
     ("[]", "application/json"), ('{"choices": []}', "application/json"), ('{"choices": [{}]}', "application/json"),
     ("", "application/json")],
)  # fmt: skip
def test_what_is_no_completion(serve, sample, body: str, kind: str) -> None:
    url, server = serve(lambda text, n: Reply(body=body, headers={"content-type": kind}))
    _, said = failure(judge(url, max_retries=0), [sample("r")])
    assert "answered what is no chat completion: " in said and len(server.asked) == 1
    assert ("<html>" in said) == ("<html>" in body)


# -- limits


@pytest.mark.parametrize("bound", [1, 4])
def test_concurrency_reaches_its_bound_and_no_more(serve, sample, bound: int) -> None:
    together = threading.Barrier(bound)

    def answer(text: str, number: int) -> Reply:
        together.wait(20)  # fails unless so many are at work at once
        time.sleep(0.02)  # for those beyond the bound to show
        return GOOD

    url, server = serve(answer)
    scores = judge(url, max_concurrency=bound, max_retries=0)(numbered(3 * bound, sample))
    assert len(scores) == len(server.asked) == 3 * bound
    assert server.most_at_work == bound


def test_requests_come_at_the_rate_retries_and_further_batches_counted(serve, sample) -> None:
    """On a clock that the test turns."""
    url, server = serve(lambda text, n: Reply(status=429, headers=SOON) if n == 0 else GOOD)
    reward = judge(url, requests_per_minute=6)
    loop, now = reward._endpoint._loop, [1000.0]
    loop.time = lambda: now[0]  # type: ignore[method-assign]
    done = []

    def batch(count: int) -> threading.Thread:
        thread = threading.Thread(target=lambda: done.append(reward(numbered(count, sample))), daemon=True)
        thread.start()
        return thread

    def turn(seconds: float) -> None:
        now[0] += seconds
        loop.call_soon_threadsafe(lambda: None)

    def stays(count: int) -> None:
        time.sleep(0.2)
        assert len(server.asked) == count

    thread = batch(2)
    server.wait_for(1)
    turn(9.9)  # one may come in 10 s
    stays(1)
    for count in (2, 3):  # the first text again, and the second
        turn(10)
        server.wait_for(count)
        stays(count)
    thread.join(20)
    thread = batch(1)
    stays(3)
    turn(10)
    server.wait_for(4)
    thread.join(20)
    assert [len(scores) for scores in done] == [2, 1]


# -- keys


def headers_of(asked: list[Asked]) -> list[str | None]:
    return [request.headers.get("authorization") for request in asked]


def test_the_key_is_that_of_the_named_variable(serve, sample, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-other")
    monkeypatch.setenv("OPENAI_ADMIN_KEY", "sk-admin")
    monkeypatch.setenv("JUDGE_KEY", "sk-secret\n")
    url, server = serve(lambda text, n: GOOD)
    judge(url, api_key_env="JUDGE_KEY")([sample("r")])
    judge(url)([sample("r")])
    assert headers_of(server.asked) == ["Bearer sk-secret", None]


def test_the_key_is_shown_nowhere(serve, sample, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    caplog.set_level(logging.DEBUG)
    key = "sk-" + "secret" * 20  # longer than a part that a shortened text keeps
    monkeypatch.setenv("JUDGE_KEY", key)
    for reply in (Reply(status=401, body=f'{{"error": "bad key {key}"}}'), Reply(f"{key} is your key"),
                  Reply(status=500, body=f"{'x' * 90} {key} {'y' * 90}")):  # fmt: skip
        url, _ = serve(lambda text, n, reply=reply: reply)
        _, said = failure(judge(url, api_key_env="JUDGE_KEY", max_retries=0, verdict_retries=0), [sample("r")])
        assert "secret" not in said and ("***" in said or "xxx" in said)
    assert "secretsecret" not in "".join(record.getMessage() for record in caplog.records)
