from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
from judge_server import Reply

from drivetrain import SampleError
from drivetrain_judges.configs import LLMPreferenceConfig
from drivetrain_judges.preference import LLMPreference


def preference(url: str, **settings: Any) -> LLMPreference:
    return LLMPreference(LLMPreferenceConfig(name="llm_preference", base_url=url, model="m", **settings))


def shown(text: str) -> tuple[str, str]:
    """The two responses of the default template."""
    found = re.search(r"\[Response A\]\n(.*)\n\n\[Response B\]\n(.*)\n\nWhich", text)
    assert found
    return found[1], found[2]


def larger(text: str, _: int = 0) -> Reply:
    """Prefers the larger number; numbers of one tens digit tie."""
    a, b = (int(response) // 10 for response in shown(text))
    return Reply(f"Verdict: {'A' if a > b else 'B' if a < b else 'tie'}")


def loyal(text: str, _: int = 0) -> Reply:
    """Prefers what is shown first, unless it is 0."""
    return Reply("**Verdict:** B" if shown(text)[0] == "0" else "Verdict: a")


def estimate(responses: list[str], win: Any) -> list[float]:
    """(1/K) sum_k P(y_i > y_k), both orders averaged, written out."""
    rates = []
    for i, own in enumerate(responses):
        total = 0.0
        for k, other in enumerate(responses):
            total += 0.5 if i == k else (win(own, other) + 1 - win(other, own)) / 2
        rates.append(total / len(responses))
    return rates


@pytest.mark.parametrize("answer", [larger, loyal])
def test_the_estimate_of_sppo(serve, sample, answer: Any) -> None:
    def win(first: str, second: str) -> float:
        verdict = answer(f"[Response A]\n{first}\n\n[Response B]\n{second}\n\nWhich").said.split()[-1].lower()
        return {"a": 1.0, "b": 0.0, "tie": 0.5}[verdict]

    url, server = serve(answer)
    groups = {"x": ["31", "0", "12", "19"], "y": ["5", "60"], "z": ["7"]}
    rows = [("x", 0), ("y", 0), ("x", 1), ("z", 0), ("x", 2), ("y", 1), ("x", 3)]
    samples = [sample(groups[uid][k], uid=uid, prompt=f"prompt {uid}") for uid, k in rows]
    rates = {uid: estimate(responses, win) for uid, responses in groups.items()}
    scores = preference(url)(samples)
    assert [score.value for score in scores] == pytest.approx([rates[uid][k] for uid, k in rows])
    assert all(score.correct is None and 0 <= score.value <= 1 for score in scores)
    assert rates["z"] == [0.5] and len(server.asked) == 4 * 3 + 2
    asked = {(re.search("prompt (.)", text)[1], *shown(text)) for text in (asked.text for asked in server.asked)}  # type: ignore[index]
    assert asked == {(uid, a, b) for uid, group in groups.items() for a in group for b in group if a != b}


def test_the_order_in_which_two_are_shown_cancels(serve, sample) -> None:
    url, _ = serve(lambda text, _: Reply("Verdict: A"))
    assert [score.value for score in preference(url)([sample("1"), sample("2"), sample("3")])] == [0.5] * 3


def test_equal_responses_tie_and_are_asked_about_once(serve, sample) -> None:
    url, server = serve(larger)
    scores = preference(url)([sample("70"), sample("5"), sample("70")])
    assert [score.value for score in scores] == pytest.approx([(0.5 + 1 + 0.5) / 3, 0.5 / 3, (0.5 + 1 + 0.5) / 3])
    assert len(server.asked) == 2
    assert [score.value for score in preference(url)([sample("1"), sample("1")])] == [0.5, 0.5]
    assert len(server.asked) == 2


@pytest.mark.parametrize("size", [4, 5, 6, 9])
def test_opponents_bound_the_requests_and_are_drawn_by_seed(serve, sample, size: int) -> None:
    url, server = serve(larger)
    samples = [sample(f"{number}0", uid=uid, prompt=uid) for uid in "xy" for number in range(size)]

    def met(**settings: Any) -> tuple[list[float], set[tuple[str, str, str]]]:
        before = len(server.asked)
        scores = preference(url, opponents=2, **settings)(samples)
        texts = [asked.text for asked in server.asked[before:]]
        return [score.value for score in scores], {(text.split("\n")[3], *shown(text)) for text in texts}

    values, pairs = met()
    assert len(pairs) == 2 * 2 * size
    for uid in "xy":
        first = Counter(a for prompt, a, _ in pairs if prompt == uid)
        assert set(first.values()) == {2} and len(first) == size
    for index, value in enumerate(values):
        own, uid = samples[index].response, samples[index].uid
        wins = [float(int(own) > int(b)) for prompt, a, b in pairs if prompt == uid and a == own]
        assert value == pytest.approx((0.5 + (size - 1) * sum(wins) / 2) / size)
    assert met() == (values, pairs)
    if size > 4:  # among four, there are only three circles
        assert any(met(seed=seed)[1] != pairs for seed in (1, 2, 3))


def test_as_many_opponents_as_there_are_is_all(serve, sample) -> None:
    url, server = serve(larger)
    samples = [sample(f"{number}0") for number in range(3)]
    assert [s.value for s in preference(url, opponents=2)(samples)] == [s.value for s in preference(url)(samples)]
    assert len(server.asked) == 12


def test_a_verdict_that_is_neither(serve, sample) -> None:
    url, _ = serve(lambda text, _: Reply("Verdict: C"))
    with pytest.raises(SampleError) as raised:
        preference(url, pattern="Verdict: (.)")([sample("1", uid="a"), sample("2"), sample("3")])
    assert raised.value.index in (1, 2) and "'Verdict: C'" in str(raised.value.__cause__)
