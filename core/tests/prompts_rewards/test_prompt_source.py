from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drivetrain import Example, UserError
from drivetrain.driver.prompts import PromptSource
from drivetrain.protocol import check_columns


def numbers(count: int) -> list[Example]:
    return [
        Example(prompt=f"{i}+1=", answer=str(i + 1), response=str(i + 1), data_source="sums", extra={"i": i})
        for i in range(count)
    ]


def uids(source: PromptSource, *sizes: int) -> list[str]:
    return [uid for size in sizes for uid in source.next_batch(size)["uid"]]


def test_a_batch_has_the_columns_of_the_contract(tokenizer: Any, data_config: Any) -> None:
    source = PromptSource(numbers(12), tokenizer, data_config(shuffle=False, template="Q: {prompt}{x}"), seed=1)
    batch = source.next_batch(11)
    check_columns(batch, ["input_ids", "attention_mask", "uid", "answer", "data_source", "response_text"])
    assert batch["input_ids"].dtype == batch["attention_mask"].dtype == torch.int64
    assert batch["raw_prompt"][10] == "Q: 10+1={x}" and batch["uid"][10] == "e0-10"
    assert tokenizer.decode(batch["input_ids"][10]) == "Q: 10+1={x}"
    assert batch["input_ids"][0, 0] == tokenizer.pad_token_id
    assert batch["attention_mask"][0].tolist() == [0] + [1] * 10
    assert batch["extra"][3] == {"i": 3} and batch["response_text"][3] == "4"


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    count=st.integers(1, 9), sizes=st.lists(st.integers(1, 25), min_size=1, max_size=6), shuffle=st.booleans(),
    stop=st.integers(0, 6),
)  # fmt: skip
def test_nothing_is_skipped_or_repeated_and_a_restart_changes_nothing(
    tokenizer: Any, data_config: Any, count: int, sizes: list[int], shuffle: bool, stop: int
) -> None:
    config = data_config(shuffle=shuffle)
    drawn = uids(PromptSource(numbers(count), tokenizer, config, seed=3), *sizes)
    assert len(set(drawn)) == len(drawn) == sum(sizes)
    for epoch in range(sum(sizes) // count):
        whole = drawn[epoch * count : (epoch + 1) * count]
        assert sorted(whole) == sorted(f"e{epoch}-{i}" for i in range(count))

    first = PromptSource(numbers(count), tokenizer, config, seed=3)
    before = uids(first, *sizes[:stop])
    resumed = PromptSource(numbers(count), tokenizer, config, seed=3)
    resumed.load_state_dict(first.state_dict())
    assert before + uids(resumed, *sizes[stop:]) == drawn


def test_a_restart_at_the_end_of_an_epoch_starts_the_next_one(tokenizer: Any, data_config: Any) -> None:
    source = PromptSource(numbers(4), tokenizer, data_config(), seed=1)
    uids(source, 4)
    resumed = PromptSource(numbers(4), tokenizer, data_config(), seed=1)
    resumed.load_state_dict(source.state_dict())
    assert {uid[:2] for uid in uids(resumed, 4)} == {"e1"}


def test_order_depends_on_epoch_and_seed_only(tokenizer: Any, data_config: Any) -> None:
    def order(seed: int) -> list[list[str]]:
        source = PromptSource(numbers(50), tokenizer, data_config(), seed=seed)
        return [[uid.split("-")[1] for uid in uids(source, 50)] for _ in range(2)]

    assert order(1) == order(1)
    assert len({tuple(epoch) for seed in (1, 2) for epoch in order(seed)}) == 4


def test_evaluation_takes_every_prompt_once_in_order(tokenizer: Any, data_config: Any) -> None:
    source = PromptSource(numbers(7), tokenizer, data_config(shuffle=True), seed=1)
    batches = list(source.all_batches(3))
    assert [len(batch) for batch in batches] == [3, 3, 1]
    assert [uid for batch in batches for uid in batch["uid"]] == [f"eval-{i}" for i in range(7)]
    assert source.state_dict() == {"epoch": 0, "position": 0}


LONG = [Example(prompt="abcdefgh"), Example(prompt="ab")]


def test_a_long_prompt_is_an_error_that_names_it(tokenizer: Any, data_config: Any) -> None:
    source = PromptSource(LONG, tokenizer, data_config(max_prompt_tokens=5, shuffle=False), seed=1)
    with pytest.raises(UserError, match=r"prompt 0 has 8 tokens; data\.max_prompt_tokens is 5") as raised:
        source.next_batch(1)
    assert "overlong" in str(raised.value)


@pytest.mark.parametrize(("overlong", "kept"), [("truncate_left", "defgh"), ("truncate_right", "abcde")])
def test_a_long_prompt_is_cut(tokenizer: Any, data_config: Any, overlong: str, kept: str) -> None:
    config = data_config(max_prompt_tokens=5, shuffle=False, overlong=overlong)
    batch = PromptSource(LONG, tokenizer, config, seed=1).next_batch(1)
    assert tokenizer.decode(batch["input_ids"][0]) == kept


def test_a_long_prompt_is_left_out_and_indices_stay(tokenizer: Any, data_config: Any) -> None:
    config = data_config(max_prompt_tokens=5, overlong="filter")
    source = PromptSource(LONG, tokenizer, config, seed=1)
    assert len(source) == 1 and uids(source, 2) == ["e0-1", "e1-1"]
    with pytest.raises(UserError, match="no prompts; all 1 are longer than 5 tokens"):
        PromptSource(LONG[:1], tokenizer, config, seed=1)


def test_an_empty_dataset_is_refused(tokenizer: Any, data_config: Any) -> None:
    with pytest.raises(UserError, match=r"no prompts \(data.eval\)"):
        PromptSource([], tokenizer, data_config(), seed=1, where="data.eval")


def test_an_empty_prompt_is_refused(tokenizer: Any, data_config: Any) -> None:
    with pytest.raises(UserError, match="prompt 0 is empty"):
        PromptSource([Example(prompt="")], tokenizer, data_config(), seed=1).next_batch(1)


MESSAGES = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1"}]


@pytest.mark.parametrize(
    ("options", "prompt", "text", "messages"),
    [
        ({}, MESSAGES, "<system>Add.<user>1+1<a>", MESSAGES),
        ({}, "1+1", "<user>1+1<a>", [{"role": "user", "content": "1+1"}]),
        ({"chat": False}, "1+1", "1+1", None),
        ({"template": "Q {prompt}"}, "1+1", "Q 1+1", None),
        ({"template": "Q {prompt}", "chat": True}, "1+1", "<user>Q 1+1<a>", [{"role": "user", "content": "Q 1+1"}]),
    ],
)
def test_chat_template(
    chat_tokenizer: Any, data_config: Any, options: Any, prompt: Any, text: str, messages: Any
) -> None:
    batch = PromptSource([Example(prompt=prompt)], chat_tokenizer, data_config(**options), seed=1).next_batch(1)
    assert batch["raw_prompt"][0] == text == chat_tokenizer.decode(batch["input_ids"][0])
    assert batch["messages"][0] == messages


def test_tokens_of_a_chat_are_those_of_the_tokenizer(chat_tokenizer: Any, data_config: Any) -> None:
    ids = chat_tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=True, return_dict=False)
    batch = PromptSource([Example(prompt=MESSAGES)], chat_tokenizer, data_config(), seed=1).next_batch(1)
    assert batch["input_ids"][0].tolist() == ids


def test_chat_that_cannot_be_is_refused(tokenizer: Any, chat_tokenizer: Any, data_config: Any) -> None:
    with pytest.raises(UserError, match="no chat template"):
        PromptSource(numbers(1), tokenizer, data_config(chat=True), seed=1)
    with pytest.raises(UserError, match="prompt 0 is a list of chat messages"):
        PromptSource([Example(prompt=MESSAGES)], tokenizer, data_config(), seed=1).next_batch(1)
    source = PromptSource([Example(prompt=MESSAGES)], chat_tokenizer, data_config(template="{prompt}"), seed=1)
    with pytest.raises(UserError, match=r"data\.template is set"):
        source.next_batch(1)


def test_padding_falls_back_to_the_end_of_sequence_token(tokenizer: Any, data_config: Any) -> None:
    tokenizer.pad_token = None
    examples = [Example(prompt="a"), Example(prompt="abc")]
    batch = PromptSource(examples, tokenizer, data_config(shuffle=False), seed=1).next_batch(2)
    assert batch["input_ids"][0, 0] == tokenizer.eos_token_id
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="neither a padding nor an end-of-sequence token"):
        PromptSource(examples, tokenizer, data_config(), seed=1)
