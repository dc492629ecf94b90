"""A task that a tiny model learns in seconds: say the larger of two digits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
)

SPECIAL = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}


CHARACTERS = "0123456789+-=,"


def write_tokenizer(folder: Path) -> dict[str, int]:
    """One of characters; returns its vocabulary."""
    vocabulary = {token: index for index, token in enumerate([*SPECIAL.values(), *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", **SPECIAL).save_pretrained(folder)
    return vocabulary


def write_model(folder: Path, seed: int = 0) -> None:
    """A random Llama of 2 layers with a tokenizer of characters."""
    write_tokenizer(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=64, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def write_experts(folder: Path, seed: int = 0) -> None:
    """A random Mixtral of 2 layers with the same tokenizer."""
    write_tokenizer(folder)
    torch.manual_seed(seed)
    config = MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, num_local_experts=4, num_experts_per_tok=2,
        sliding_window=None, pad_token_id=None, bos_token_id=1, eos_token_id=2, initializer_range=0.1,
    )  # fmt: skip
    MixtralForCausalLM(config).save_pretrained(folder)


def write_speaker(folder: Path, says: Mapping[str, str]) -> Path:
    """A Llama whose next character follows from the last one alone; of several, each is as likely."""
    vocabulary = write_tokenizer(folder)
    config = LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(len(vocabulary), 32))
        model.lm_head.weight.zero_()
        for last, following in says.items():
            for character in following:
                model.lm_head.weight[vocabulary[character], vocabulary[last]] = 10.0
    model.save_pretrained(folder)
    return folder


def write_judge(folder: Path, seed: int = 0) -> Path:
    """A random encoder of two labels, with another tokenizer than the policy's."""
    special = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
    vocabulary = {token: index for index, token in enumerate([*special.values(), *"=,-+9876543210"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=len(vocabulary), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=32, num_labels=2, initializer_range=0.3,
    )  # fmt: skip
    BertForSequenceClassification(config).save_pretrained(folder)
    return folder


def write_prompts(path: Path) -> None:
    """All hundred pairs of digits."""
    pairs = [(a, b) for a in range(10) for b in range(10)]
    rows = [{"prompt": f"{a},{b}=", "answer": str(max(a, b)), "response": str(max(a, b))} for a, b in pairs]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_configs(folder: Path) -> tuple[Path, Path]:
    """A model, prompts, and the configs of a supervised and of a GRPO run."""
    write_model(folder / "model")
    write_prompts(folder / "prompts.jsonl")
    prompts = {"name": "jsonl", "path": str(folder / "prompts.jsonl"), "response_key": "response"}
    shared = {
        "model": {"path": str(folder / "model")},
        "rollout": {"name": "hf", "max_response_tokens": 3},
        "data": {"batch_prompts": 50, "train": prompts, "eval": prompts},
        "rewards": [{"name": "exact_match"}],
    }
    actor = {"backend": {"name": "fsdp"}, "optimizer": {"name": "adamw", "weight_decay": 0.0}}

    def write(name: str, algorithm: dict[str, object], lr: float, steps: int) -> Path:
        run = {
            **shared, "algorithm": algorithm,
            "actor": {**actor, "optimizer": {**actor["optimizer"], "lr": lr}},
            "trainer": {"steps": steps, "run_dir": str(folder / "runs" / name)},
        }  # fmt: skip
        path = folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(run))
        return path

    sft = write("sft", {"name": "sft"}, lr=3e-3, steps=12)
    grpo = write(
        "grpo", {"name": "grpo", "group_size": 8, "clip_high": 0.28, "old_log_probs": "rollout"}, lr=1e-3, steps=40
    )
    return sft, grpo
