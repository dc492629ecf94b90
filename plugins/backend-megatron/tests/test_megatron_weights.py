"""Weights come from a folder slice by slice, and leave in buckets; what does not fit is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import megatron_rig as rig
import pytest
import torch
from megatron.core import parallel_state
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from drivetrain import RankLayout, RunError, UserError
from drivetrain.weights import lend
from drivetrain_backend_megatron import build, cpu, families, parallel, weights
from drivetrain_backend_megatron.config import MegatronConfig


@pytest.fixture(autouse=True)
def on_cpu() -> Iterator[None]:
    with cpu.stand_in():
        yield
    parallel.release()


def edited(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Make one file of a folder's weights, with other tensors; those of None are left out."""
    held: dict[str, Any] = {}
    for file in folder.glob("*.safetensors"):
        held |= load_file(file)
        file.unlink()
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    held |= {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    save_file({name: tensor for name, tensor in held.items() if tensor is not None}, folder / "model.safetensors")


@pytest.mark.parametrize(
    "tensors, says",
    [
        ({"model__norm__weight": None}, "has no tensor model.norm.weight"),
        ({"model__norm__weight": torch.ones(31)}, r"the shape \[31\].*config says \[32\]"),
        ({"lm_head__weight": torch.ones(rig.VOCAB, 32)}, "lm_head.weight differs from the embedding"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused(tmp_path: Path, tensors: dict[str, Any], says: str) -> None:
    edited(rig.write_model("tied", tmp_path), **tensors)
    with pytest.raises(UserError, match=f"(?s){says}"):
        rig.make(tmp_path, MegatronConfig())


def test_a_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    rig.write_model("llama", tmp_path)
    for file in tmp_path.glob("*.safetensors*"):
        file.unlink()
    with pytest.raises(UserError, match="no weights as safetensors"):
        rig.make(tmp_path, MegatronConfig())


def test_a_copy_of_the_embedding_as_output_layer_is_as_good_as_none(tmp_path: Path) -> None:
    rig.write_model("tied", tmp_path)
    edited(tmp_path)
    edited(tmp_path, lm_head__weight=load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"].clone())
    entries = list(weights.Gatherer(*rig.make(tmp_path, MegatronConfig())).entries())
    assert [(entry.name, entry.alias) for entry in entries if entry.alias] == [
        ("lm_head.weight", "model.embed_tokens.weight")
    ]


def test_buckets_are_bounded(tmp_path: Path) -> None:
    made = rig.make(rig.write_model("mixtral", tmp_path), MegatronConfig())
    gatherer = weights.Gatherer(made.pieces, made.table)
    with lend(gatherer.entries(), bucket_bytes=8000) as stream:
        sizes = [(len(bucket.entries), sum(entry.nbytes for entry in bucket.entries)) for bucket in stream]
    assert all(size <= 8000 for _, size in sizes)
    assert sum(count for count, _ in sizes) == sum(len(parameter.tensors) for parameter in made.table.values())


def test_norms_within_linear_layers_have_the_names_of_others(tmp_path: Path) -> None:
    """As layers of TransformerEngine have them: what is read and what leaves is the same."""
    folder = rig.write_model("qwen2", tmp_path, num_hidden_layers=1)
    made = rig.make(folder, MegatronConfig())
    plain = weights.held(made.pieces)
    for layer in made.pieces[0].decoder.layers:
        for norm, linear in ((layer.input_layernorm, layer.self_attention.linear_qkv),
                             (layer.pre_mlp_layernorm, layer.mlp.linear_fc1)):  # fmt: skip
            linear.layer_norm_weight = norm.weight
            del norm.weight
    fused = weights.held(made.pieces)
    assert fused.keys() == plain.keys() and all(fused[name] is plain[name] for name in plain)
    assert rig.same_weights(folder, made)


def test_rotary_embeddings_of_an_unknown_type_are_refused(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
    folder = rig.write_model("llama", tmp_path, rope_parameters=rope)
    with pytest.raises(UserError, match="type 'yarn'"):
        rig.make(folder, MegatronConfig())


def test_models_of_a_process_share_their_groups() -> None:
    parallel.initialize(MegatronConfig(), communication_backend="gloo", seed=1)
    parallel.initialize(MegatronConfig(), communication_backend="gloo", seed=2)
    assert parallel.layout() == RankLayout()
    with pytest.raises(RunError, match="1 processes are not a multiple of tensor 2"):
        parallel.initialize(MegatronConfig(tensor_model_parallel_size=2), communication_backend="gloo", seed=1)
    parallel.release()
    assert parallel_state.model_parallel_is_initialized()  # the other model has them still


def test_bfloat16_weights_are_read_as_they_are(tmp_path: Path) -> None:
    folder = rig.write_model("qwen3", tmp_path)
    hf_config = AutoConfig.from_pretrained(folder)
    entries = hf_config.to_dict()
    kind, shape = families.family(entries), families.Shape.of(entries)
    parallel.initialize(MegatronConfig(), communication_backend="gloo", seed=5)
    options = build.transformer_config(MegatronConfig(), kind, shape, entries, dtype=torch.bfloat16, device=rig.CPU)
    made = rig.Made(build.build(options, shape, hf_config, rig.CPU), families.parameters(kind, shape))
    weights.load(made.pieces, made.table, folder)
    stored = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    for entry in weights.Gatherer(made.pieces, made.table).entries():
        assert entry.tensor.equal(stored[entry.name].bfloat16()), entry.name
