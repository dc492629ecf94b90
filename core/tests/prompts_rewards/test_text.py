from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain import DataProto, Example, ModelConfig, UserError
from drivetrain.driver.prompts import PromptSource
from drivetrain.driver.text import ResponseEncoder, decode_responses, load_tokenizer
from drivetrain.protocol import check_columns


def test_a_saved_tokenizer_loads(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(ModelConfig(path="elsewhere", tokenizer=tmp_path))
    assert loaded("1+1")["input_ids"] == tokenizer("1+1")["input_ids"]


@pytest.mark.parametrize("files", [[], ["config.json"]])
def test_a_folder_without_tokenizer_is_refused(tmp_path: Path, files: list[str]) -> None:
    for name in files:
        (tmp_path / name).write_text('{"model_type": "qwen2"}')
    with pytest.raises(UserError, match="no tokenizer files") as raised:
        load_tokenizer(ModelConfig(path=tmp_path))
    assert "model.tokenizer" in str(raised.value)
    with pytest.raises(UserError, match="no such folder"):
        load_tokenizer(ModelConfig(path=tmp_path / "none"))


def test_given_responses_become_a_batch(tokenizer: Any, data_config: Any) -> None:
    examples = [Example(prompt="1+1=", response="2"), Example(prompt="10+1=", response="11")]
    prompts = PromptSource(examples, tokenizer, data_config(shuffle=False), seed=1).next_batch(2)
    batch = ResponseEncoder(tokenizer).respond(prompts)
    check_columns(batch, ["prompts", "responses", "input_ids", "attention_mask", "response_mask"])
    assert batch["responses"].tolist()[0][1:] == [tokenizer.eos_token_id, tokenizer.pad_token_id]
    assert batch["response_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert batch["attention_mask"].tolist() == [[0, 1, 1, 1, 1, 1, 1, 0], [1] * 8]
    assert torch.equal(batch["input_ids"], torch.cat([prompts["input_ids"], batch["responses"]], 1))
    assert decode_responses(batch, tokenizer) == ["2", "11"]
    assert prompts["input_ids"].shape == (2, 5)


def test_a_missing_response_is_named(tokenizer: Any, data_config: Any) -> None:
    prompts = PromptSource([Example(prompt="1")], tokenizer, data_config(), seed=1).next_batch(1)
    with pytest.raises(UserError, match="prompt e0-0 has no response"):
        ResponseEncoder(tokenizer).respond(prompts)


def test_several_texts_of_a_prompt_are_rows_one_after_the_other(tokenizer: Any, data_config: Any) -> None:
    examples = [
        Example(prompt="1+1=", response="2", rejected="123"),
        Example(prompt="10+1=", response="11", rejected=""),
    ]
    prompts = PromptSource(examples, tokenizer, data_config(shuffle=False), seed=1).next_batch(2)
    batch = ResponseEncoder(tokenizer).respond(prompts, "response_text", "rejected_text")
    check_columns(batch, ["prompts", "responses", "input_ids", "attention_mask", "response_mask", "rejected_text"])
    assert batch["uid"].tolist() == ["e0-0", "e0-0", "e0-1", "e0-1"]
    assert decode_responses(batch, tokenizer) == ["2", "123", "11", ""]
    assert batch["response_mask"].sum(1).tolist() == [2, 4, 3, 1]
    assert torch.equal(batch["input_ids"], torch.cat([batch["prompts"], batch["responses"]], 1))
    alone = ResponseEncoder(tokenizer).respond(prompts, "rejected_text")
    assert decode_responses(alone, tokenizer) == ["123", ""]


def test_a_missing_rejected_response_is_named(tokenizer: Any, data_config: Any) -> None:
    prompts = PromptSource([Example(prompt="1", response="2")], tokenizer, data_config(), seed=1).next_batch(1)
    with pytest.raises(UserError, match="prompt e0-0 has no rejected response") as raised:
        ResponseEncoder(tokenizer).respond(prompts, "response_text", "rejected_text")
    assert "set rejected_key" in str(raised.value)


def test_an_end_of_sequence_token_is_needed(tokenizer: Any) -> None:
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="no end-of-sequence token"):
        ResponseEncoder(tokenizer)


def test_tokens_that_the_policy_did_not_choose_are_not_decoded(tokenizer: Any) -> None:
    ids = torch.tensor([tokenizer("a<tool>b")["input_ids"]])
    mask = torch.tensor([[1, 0, 0, 0, 0, 0, 0, 1]][:1])[:, : ids.shape[1]]
    assert decode_responses(DataProto({"responses": ids, "response_mask": mask}), tokenizer) == ["ab"]
