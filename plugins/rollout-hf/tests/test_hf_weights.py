"""Weights that are loaded into the engine's own model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_hf import one, tiny
from transformers.core_model_loading import revert_weight_conversion

from drivetrain import Completion, DrivetrainError, UserError, WeightStreamError
from drivetrain.weights import Bucket, Placement, WeightEntry, lend

LONG = {"max_tokens": 20, "ignore_eos": True}
Tensors = list[tuple[str, torch.Tensor, str | None]]


def tensors(model: Any, *, files: bool = False) -> Tensors:
    """What a trainer would lend: each tensor once, a tied one as an alias."""
    state = model.state_dict()
    if files:
        state = revert_weight_conversion(model, dict(state))
    first: dict[int, str] = {}
    return [
        (name, tensor, None if (known := first.setdefault(tensor.data_ptr(), name)) == name else known)
        for name, tensor in state.items()
    ]


def assert_same_samples(got: Completion, expected: Completion) -> None:
    """Equal but for rounding: products are summed in another order where tensors are aligned differently."""
    assert got.token_ids == expected.token_ids
    assert got.log_probs == pytest.approx(expected.log_probs, abs=1e-5)


def load(engine: Any, sent: Tensors, version: int = 3) -> None:
    with lend(sent, bucket_bytes=5000, version=version) as stream:
        engine.load_weights(stream, version)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mixtral"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("files", [False, True])
def test_loaded_weights_generate_as_their_source(family: str, tied: bool, files: bool, make_engine: Any) -> None:
    before, after = (tiny(family, seed=seed, tie_word_embeddings=tied) for seed in (0, 1))
    engine = make_engine(before, own=True)
    old = one(engine, [5, 6], **LONG)
    assert_same_samples(old, one(make_engine(before), [5, 6], **LONG))
    load(engine, tensors(after, files=files))
    new = one(engine, [5, 6], **LONG)
    expected = one(make_engine(after), [5, 6], **LONG)
    assert_same_samples(new, expected)
    assert new.token_ids != old.token_ids
    assert new.weight_versions == ((0, 3),) and engine.weight_version == 3
    own = engine._module
    assert (own.lm_head.weight is own.model.embed_tokens.weight) == tied
    assert not any(parameter.requires_grad for parameter in own.parameters())


def without(sent: Tensors, name: str) -> Tensors:
    return [entry for entry in sent if entry[0] != name]


def broken_streams(sent: Tensors) -> Iterator[tuple[str, Tensors]]:
    norm = "model.norm.weight"
    yield "1 weights were not sent, first 'model.norm.weight'", without(sent, norm)
    yield "'model.norm.weight' was sent twice", [*sent, (norm, torch.ones(32), None)]
    yield "no such weight", [*sent, ("model.extra", torch.ones(1), None)]
    yield r"shape \(31,\); expected \(32,\)", [*without(sent, norm), (norm, torch.ones(31), None)]
    yield "alias of 'nothing'", [*without(sent, norm), (norm, torch.ones(32), "nothing")]


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("which", range(5))
def test_an_incomplete_stream_is_an_error_and_makes_the_engine_unusable(
    family: str, which: int, make_engine: Any
) -> None:
    model = tiny(family)
    engine = make_engine(model, own=True)
    expected = one(engine, [5], **LONG)
    message, sent = list(broken_streams(tensors(model, files=True)))[which]
    with pytest.raises(WeightStreamError, match=message):
        load(engine, sent)
    assert engine.weight_version == 0
    with pytest.raises(DrivetrainError, match=r"no usable weights: the load of weights of version 3"):
        one(engine, [5])
    load(engine, tensors(model, files=True))
    assert one(engine, [5], **LONG).token_ids == expected.token_ids


def test_tied_tensors_that_differ_as_sent(make_engine: Any) -> None:
    model = tiny(tie_word_embeddings=True)
    engine = make_engine(model, own=True)
    sent: Tensors = [(name, tensor.clone(), None) for name, tensor in model.state_dict().items()]
    load(engine, sent)
    sent[-1] = (sent[-1][0], sent[-1][1] + 1, None)
    with pytest.raises(WeightStreamError, match="one tensor here, but differ"):
        load(engine, sent)


def test_aliases_that_are_two_tensors_here(make_engine: Any) -> None:
    tied = tiny(tie_word_embeddings=True, seed=1)
    engine = make_engine(tiny(), own=True)
    load(engine, tensors(tied))
    assert one(engine, [5], **LONG).token_ids == one(make_engine(tied), [5], **LONG).token_ids


@pytest.mark.parametrize("bucket", [{"kind": "adapter"}, {"placement": Placement(dim=0, index=0, count=2)}])
def test_adapters_and_shards_are_refused(bucket: dict[str, Any], make_engine: Any) -> None:
    engine = make_engine(tiny(), own=True)
    entry = WeightEntry(
        name="model.norm.weight", shape=(32,), dtype=torch.float32, _tensor=torch.ones(32),
        placement=bucket.get("placement", Placement()),
    )  # fmt: skip
    stream: Any = [Bucket(entries=(entry,), kind=bucket.get("kind", "full"))]
    with pytest.raises(WeightStreamError, match="full weights|whole tensors"):
        engine.load_weights(stream, 1)


def test_nothing_is_loaded_over_the_trainers_module(make_engine: Any) -> None:
    model = tiny()
    with pytest.raises(DrivetrainError, match="nothing to load"):
        load(make_engine(model), tensors(model))


def test_own_model_in_another_dtype_and_with_random_weights(make_engine: Any) -> None:
    model = tiny()
    engine = make_engine(model, own=True, dtype="bfloat16", init="random")
    random = one(engine, [5], **LONG)
    assert engine._module.dtype == torch.bfloat16
    assert random == one(make_engine(model, own=True, dtype="bfloat16", init="random"), [5], **LONG)
    load(engine, tensors(model))
    assert torch.equal(engine._module.lm_head.weight, model.lm_head.weight.bfloat16())


def test_weights_of_its_own_are_read_whole_or_not_at_all(make_engine: Any) -> None:
    engine = make_engine(tiny(), own=True)
    [file] = engine.context.model.path.glob("*.safetensors")
    held = load_file(file)
    gone = next(name for name in held if "layers.1" in name)
    save_file({name: tensor for name, tensor in held.items() if name != gone}, file, {"format": "pt"})
    with pytest.raises(UserError, match=f"lacks 1 weights, first '{gone}' .model.path."):
        one(engine, [5])
    file.unlink()
    with pytest.raises(UserError, match="does not load as a causal language model"):
        one(engine, [5])
