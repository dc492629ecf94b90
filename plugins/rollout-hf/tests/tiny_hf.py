"""Tiny models with random weights, a tiny tokenizer, and requests for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from drivetrain import Completion, GenerationRequest, SamplingParams
from drivetrain_rollout_hf.engine import HFRollout

transformers.logging.set_verbosity_error()
torch.set_num_threads(1)

EOS = 2
VOCABULARY = 32
TEXTS = ["<pad>", "<bos>", "<eos>", *"abcdefghijklmnop", "ab", "b.", ".c", "x.y", "the", " ", "q!", "!q", "zz", "..",
         "0", "1", "2"]  # fmt: skip
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "mixtral")


def tiny(family: str = "llama", *, vocabulary: int = VOCABULARY, seed: int = 0, **options: Any) -> PreTrainedModel:
    """A model of some family. Weights are large, so that its distributions are far from uniform."""
    extra: dict[str, Any] = {
        "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
        "mistral": {"sliding_window": 5},
        "qwen3": {"head_dim": 8},
    }.get(family, {})
    settings = {
        "vocab_size": vocabulary, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.3,
        "bos_token_id": 1, "eos_token_id": EOS, "pad_token_id": 0, "tie_word_embeddings": False, **extra, **options,
    }  # fmt: skip
    config = transformers.CONFIG_MAPPING[family](**settings)
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def save_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Write a tokenizer in which some tokens have several characters."""
    assert len(TEXTS) == VOCABULARY
    bare = Tokenizer(models.WordLevel({text: place for place, text in enumerate(TEXTS)}, unk_token="<pad>"))
    bare.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bare, eos_token="<eos>", bos_token="<bos>", pad_token="<pad>")
    tokenizer.save_pretrained(folder)
    return tokenizer


def request(prompt: Sequence[int], name: str = "r", seeds: Iterable[int] = (0,), **sampling: Any) -> GenerationRequest:
    """A request, by default of one sample."""
    return GenerationRequest(
        request_id=name, prompt_token_ids=tuple(prompt), seeds=tuple(seeds), sampling=SamplingParams(**sampling)
    )


def prompts(count: int, *, seed: int = 0, vocabulary: int = VOCABULARY) -> list[list[int]]:
    """Prompts of 1 to 9 tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 10, (count,), generator=generator).tolist()
    return [torch.randint(3, vocabulary, (length,), generator=generator).tolist() for length in lengths]


def one(engine: HFRollout, *args: Any, **kwargs: Any) -> Completion:
    """The only sample of the only request."""
    ((completion,),) = engine.generate_batch([request(*args, **kwargs)])
    return completion
