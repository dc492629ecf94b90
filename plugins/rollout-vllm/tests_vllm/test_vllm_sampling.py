"""Seeds, and what ends a response."""

from __future__ import annotations

from typing import Any

import pytest
from rig_vllm import ATOL, EOS, TEXTS, Served, furthest, greedy, prompts, request

SAMPLES = 8


def text(tokens: Any) -> str:
    return "".join(TEXTS[token] for token in tokens)


def test_a_seed_draws_the_same_tokens_alone_beside_others_and_again(served: Served) -> None:
    wanted = {"max_tokens": 20, "temperature": 1.2}
    seeds = [2**64 - 1, 2**63 + 5, 17, 0, 1, 2, 3, 4]
    rows = prompts(6)
    asked = [request(row, str(at), seeds, **wanted) for at, row in enumerate(rows)]
    together = served.engine.generate_batch(asked)
    assert [c.sample for c in together[0]] == list(range(SAMPLES))
    assert len({c.token_ids for c in together[0]}) == SAMPLES, "different seeds differ"
    for at in (1, 5):
        for place in (0, 3, 7):
            (alone,) = served.draw(rows[at], "alone", [seeds[place]], **wanted)
            assert alone.token_ids == together[at][place].token_ids
            assert alone.log_probs == pytest.approx(together[at][place].log_probs, abs=ATOL)
    again = served.engine.generate_batch(list(reversed(asked)))
    assert [[c.token_ids for c in group] for group in reversed(again)] == [[c.token_ids for c in g] for g in together]


def test_end_of_sequence_stays_in_the_response(served: Served) -> None:
    asked = request([7, 8, 9], "r", range(64), max_tokens=40, temperature=1.5)
    got = served.engine.generate_batch([asked])
    assert furthest(served.model, [asked], got) < ATOL
    ended = [c for c in got[0] if c.finish_reason == "stop"]
    assert ended and len(ended) < 64
    for completion in got[0]:
        if completion.finish_reason == "stop":
            assert completion.token_ids[-1] == EOS and EOS not in completion.token_ids[:-1]
        else:
            assert completion.finish_reason == "length" and len(completion.token_ids) == 40
            assert EOS not in completion.token_ids
        assert len(completion.log_probs) == len(completion.token_ids)
    seeds = [c.sample for c in ended]
    on = served.draw([7, 8, 9], "r", seeds, max_tokens=40, temperature=1.5, ignore_eos=True)
    for short, long in zip(ended, on, strict=True):
        assert (long.finish_reason, len(long.token_ids)) == ("length", 40)
        assert long.token_ids[: len(short.token_ids)] == short.token_ids


def test_responses_of_at_least_so_many_tokens(served: Served) -> None:
    """What ends a response counts, and may be its last required token."""
    ends = tuple(range(3, 110))  # most tokens, so that a response ends as soon as it may
    asked = [request([7, 8, 9], str(least), range(16), max_tokens=12, min_tokens=least, stop_token_ids=ends)
             for least in (0, 1, 2, 9)]  # fmt: skip
    got = served.engine.generate_batch(asked)
    assert [min(len(c.token_ids) for c in group) for group in got] == [1, 1, 2, 9]


def test_stop_tokens(llama: Served) -> None:
    said = greedy(llama.model, [7, 8, 9], 12)
    for stop in (said[5], said[9]):
        end = said.index(stop) + 1
        wanted = {"max_tokens": 12, "temperature": 0, "stop_token_ids": (stop,)}
        for more in ({}, {"ignore_eos": True}):
            (got,) = llama.draw([7, 8, 9], **wanted, **more)
            assert (list(got.token_ids), got.finish_reason) == (said[:end], "stop")
        (got,) = llama.draw([7, 8, 9], **wanted, min_tokens=end)
        assert len(got.token_ids) >= end


def test_stop_strings_within_and_across_tokens(llama: Served) -> None:
    """The token that completes the string is the last one."""
    (free,) = llama.draw([7, 8, 9], max_tokens=24, temperature=0, ignore_eos=True)
    for first in (3, 10, 17):
        words = [text(free.token_ids[first : first + 2]), text(free.token_ids[first : first + 1])]
        for stop in (words[0], words[1][-1]):
            end = next(n for n in range(1, 25) if stop in text(free.token_ids[:n]))
            (got,) = llama.draw([7, 8, 9], max_tokens=24, temperature=0, ignore_eos=True, stop=("never there", stop))
            assert (got.token_ids, got.finish_reason) == (free.token_ids[:end], "stop")
            assert got.log_probs == pytest.approx(free.log_probs[:end], abs=ATOL)
    (got,) = llama.draw([7, 8, 9], max_tokens=24, temperature=0, ignore_eos=True, stop=("never there",))
    assert (got.token_ids, got.finish_reason) == (free.token_ids, "length")


def test_each_request_has_its_own_parameters(llama: Served) -> None:
    lengths = (1, 3, 7, 20)
    asked = [request(row, str(at), (1, 2), max_tokens=most, ignore_eos=True, temperature=at / 2)
             for at, (row, most) in enumerate(zip(prompts(4), lengths, strict=True))]  # fmt: skip
    got = llama.engine.generate_batch(asked)
    assert [{len(c.token_ids) for c in group} for group in got] == [{most} for most in lengths]
    assert {c.finish_reason for group in got for c in group} == {"length"}
    assert furthest(llama.model, asked, got) < ATOL
