"""What a stream has to hold for a model: told by its config, in the names of files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from drivetrain import ModelConfig, WeightStreamError
from drivetrain.weights import Bucket, Placement, WeightEntry
from drivetrain_rollout_vllm.receiving import accepted, manifest_of

SHAPE = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
         "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32}  # fmt: skip


def write(folder: Path, family: str, **more: Any) -> ModelConfig:
    config = transformers.CONFIG_MAPPING[family](**SHAPE, **more)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return ModelConfig(path=folder)


@pytest.mark.parametrize("family, more", [
    ("llama", {"tie_word_embeddings": False}), ("llama", {"tie_word_embeddings": True}),
    ("qwen2", {"tie_word_embeddings": False}), ("qwen3", {"tie_word_embeddings": True}),
    ("mixtral", {"num_local_experts": 4}),
])  # fmt: skip
def test_names_and_shapes_are_those_of_the_files(family: str, more: dict[str, Any], tmp_path: Path) -> None:
    """Tied embeddings stand in a file once, and come with both names."""
    model = write(tmp_path, family, **more)
    expected = manifest_of(model).expected
    held = load_file(tmp_path / "model.safetensors")
    tied = {"lm_head.weight"} if more.get("tie_word_embeddings") else set()
    assert expected.keys() == held.keys() | tied
    assert all(expected[name][0] == tuple(tensor.shape) for name, tensor in held.items())


def bucket(*entries: WeightEntry, kind: str = "full") -> Bucket:
    return Bucket(entries=entries, kind=kind)


def test_entries_that_carry_a_tensor(tmp_path: Path) -> None:
    manifest = manifest_of(write(tmp_path, "llama", tie_word_embeddings=True))
    embedding = WeightEntry.whole("model.embed_tokens.weight", torch.ones(32, 16))
    head = WeightEntry.whole("lm_head.weight", torch.ones(32, 16), "model.embed_tokens.weight")
    assert accepted(bucket(embedding, head), manifest) == [embedding]
    with pytest.raises(WeightStreamError, match="'lm_head.weight' was sent twice"):
        accepted(bucket(head), manifest)
    with pytest.raises(WeightStreamError, match="weights were not sent, first"):
        manifest.complete()


def test_what_is_refused(tmp_path: Path) -> None:
    manifest = manifest_of(write(tmp_path, "llama"))
    norm = WeightEntry.whole("model.norm.weight", torch.ones(16))
    share = WeightEntry.share("model.norm.weight", torch.ones(8), (16,), Placement(dim=0, index=0, count=2))
    for wrong, message in (
        (bucket(norm, kind="adapter"), "takes full weights; a bucket of kind 'adapter'"),
        (bucket(share), "'model.norm.weight' was sent as a shard"),
        (bucket(WeightEntry.whole("model.other", torch.ones(1))), "no such weight"),
        (bucket(WeightEntry.whole("model.norm.weight", torch.ones(15))), r"shape \(15,\); expected \(16,\)"),
        (bucket(WeightEntry.whole("model.norm.weight", torch.ones(16).long())), "torch.int64; expected"),
    ):
        with pytest.raises(WeightStreamError, match=message):
            accepted(wrong, manifest)
