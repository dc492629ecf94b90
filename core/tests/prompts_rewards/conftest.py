"""A tokenizer of single characters, so that lengths in tokens are lengths in characters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from drivetrain.config import DataConfig

CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"


def character_tokenizer(**options: Any) -> PreTrainedTokenizerFast:
    vocabulary = {"[PAD]": 0, "[EOS]": 1, "[UNK]": 2} | {chr(code): code - 29 for code in range(32, 127)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Split(Regex(""), "isolated")
    tokenizer.decoder = Fuse()
    special = {"pad_token": "[PAD]", "eos_token": "[EOS]", "unk_token": "[UNK]"} | options
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return character_tokenizer()


@pytest.fixture
def chat_tokenizer() -> PreTrainedTokenizerFast:
    made = character_tokenizer()
    made.chat_template = CHAT
    return made


@pytest.fixture
def data_config() -> Callable[..., DataConfig]:
    def make(**options: Any) -> DataConfig:
        return DataConfig(**{"train": {"name": "any"}, "batch_prompts": 4} | options)

    return make
