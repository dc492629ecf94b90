"""How a response ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_hf import EOS, TEXTS, one, prompts, request, save_tokenizer, tiny

from drivetrain import UserError, end_of_sequence_ids
from drivetrain_rollout_hf.stopping import StopStrings, load_tokenizer


def test_end_of_sequence_ends_and_stays(make_engine: Any) -> None:
    engine = make_engine(tiny())
    (completions,) = engine.generate_batch([request([5, 6], seeds=range(64), max_tokens=30)])
    reasons = {got.finish_reason for got in completions}
    assert reasons == {"stop", "length"}
    for got in completions:
        assert (got.token_ids[-1] == EOS) == (got.finish_reason == "stop")
        assert EOS not in got.token_ids[:-1]
        assert got.finish_reason == "stop" or len(got.token_ids) == 30


def test_ignore_eos_goes_on(make_engine: Any) -> None:
    engine = make_engine(tiny())
    (completions,) = engine.generate_batch([request([5, 6], seeds=range(64), max_tokens=30, ignore_eos=True)])
    assert all(len(got.token_ids) == 30 and got.finish_reason == "length" for got in completions)
    assert any(EOS in got.token_ids for got in completions)


def test_min_tokens_keeps_back_every_token_that_would_end(make_engine: Any) -> None:
    engine = make_engine(tiny())
    asked = request([5, 6], seeds=range(64), min_tokens=5, max_tokens=30, stop_token_ids=(7, 9))
    (completions,) = engine.generate_batch([asked])
    lengths = [len(got.token_ids) for got in completions]
    assert min(lengths) == 5
    assert not any({EOS, 7, 9} & set(got.token_ids[:4]) for got in completions)


def test_stop_tokens_end_and_stay(make_engine: Any) -> None:
    engine = make_engine(tiny())
    free = one(engine, [5, 6], max_tokens=20, ignore_eos=True)
    stop = free.token_ids[7]
    got = one(engine, [5, 6], max_tokens=20, ignore_eos=True, stop_token_ids=(stop, 10_000))
    assert got.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert got.finish_reason == "stop"


@pytest.mark.parametrize("min_tokens", [0, 6])
def test_stop_strings_also_inside_and_across_tokens(min_tokens: int, make_engine: Any) -> None:
    engine = make_engine(tiny(), tokenizer=True)
    checked = 0
    for place, prompt in enumerate(prompts(8)):
        options = {"max_tokens": 20, "seeds": (place,), "ignore_eos": True}
        free = one(engine, prompt, **options)
        text = "".join(TEXTS[token] for token in free.token_ids)
        for begin in range(3, len(text) - 6, 5):
            stop = text[begin : begin + 1 + begin % 4]
            got = one(engine, prompt, **options, stop=(stop, "never this"), min_tokens=min_tokens)
            expected = next(
                (
                    count for count in range(max(1, min_tokens), 20)
                    if stop in _after(free.token_ids, count, len(stop), min_tokens)
                ), None,
            )  # fmt: skip
            if min_tokens == 0:
                assert expected is not None
            if expected is not None:
                checked += 1
                assert got.token_ids == free.token_ids[:expected]
                assert got.finish_reason == "stop"
            else:
                assert got.token_ids == free.token_ids
    assert checked > 20


def _after(tokens: tuple[int, ...], count: int, reach: int, min_tokens: int) -> str:
    """Text in which a stop string may lie that is completed by the last token or, past the minimum, earlier."""
    known = "".join(TEXTS[token] for token in tokens[: max(min_tokens - 1, 0)])
    return ("#" + known)[len(known) + 2 - reach if len(known) + 1 >= reach else 0 :] + "".join(
        TEXTS[token] for token in tokens[max(min_tokens - 1, 0) : count]
    )


class ByteTokenizer:
    """Tokens are groups of bytes, as in byte-level vocabularies."""

    pieces = [b"a", b"END\xc3", b"\xa9", b"E", b"N", b"D", b"", b"\xe2\x82", b"\xac!"]

    def decode(self, tokens: list[int], **options: Any) -> str:
        return b"".join(self.pieces[token] for token in tokens).decode("utf-8", errors="replace")


@pytest.mark.parametrize(
    ("strings", "tokens"),
    [
        (("END",), [0, 0, 1]),  # completed by a token that ends inside the next character
        (("\N{LATIN SMALL LETTER E WITH ACUTE}",), [0, 1, 2]),
        (("END",), [0, 3, 6, 4, 6, 5]),
        (("\N{EURO SIGN}!",), [0, 7, 8]),
        (("aa", "aaaaaa"), [0, 3, 0, 0]),
    ],
)
def test_stop_strings_in_byte_tokens(strings: tuple[str, ...], tokens: list[int]) -> None:
    watch = StopStrings(ByteTokenizer(), strings)
    assert [watch.push(token) for token in tokens] == [False] * (len(tokens) - 1) + [True]


def test_a_string_completed_before_the_minimum_does_not_end_a_response_later() -> None:
    watch = StopStrings(ByteTokenizer(), ("aa", "aaEEEEEE"))
    told = [watch.push(token, armed=place > 1) for place, token in enumerate([0, 0, 3, 3, 0, 0])]
    assert told == [False] * 5 + [True]


def test_stop_strings_without_a_tokenizer_are_refused(make_engine: Any) -> None:
    with pytest.raises(UserError, match="need a tokenizer"):
        one(make_engine(tiny()), [5], stop=("a",))


def test_end_of_sequence_ids_come_from_generation_config_and_tokenizer(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path, trust_remote_code=False) is None
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 9}))
    assert end_of_sequence_ids(tmp_path, None) == {9}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert end_of_sequence_ids(tmp_path, None) == {5, 6}
    save_tokenizer(tmp_path)
    assert end_of_sequence_ids(tmp_path, load_tokenizer(tmp_path, trust_remote_code=False)) == {2, 5, 6}
