"""Checkpoints, exports and weights on loan."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsdp_rig as rig
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from drivetrain import CheckpointError, ExpiredWeightsError, NonFiniteError, UserError
from drivetrain.weights import Manifest, WeightEntry
from drivetrain_backend_common import tensor_files
from drivetrain_backend_fsdp import names


def step(made, seed: int):
    data = rig.batch(seed=seed)
    return made.update(data, rig.TERMS, rig.counts(data), temperature=1.0, lr_factor=1.0)["loss"].result()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resumed_training_continues_bit_for_bit(qwen2: Path, tmp_path: Path, dtype: str) -> None:
    made = rig.backend(qwen2, model={"dtype": dtype})
    step(made, 1), step(made, 2)
    made.save(tmp_path)
    drawn = torch.rand(3)
    losses = [step(made, 3), step(made, 4)]
    fresh = rig.backend(qwen2, model={"dtype": dtype, "init": "random"})
    step(fresh, 9)
    fresh.load(tmp_path)
    assert torch.rand(3).equal(drawn)
    assert [step(fresh, 3), step(fresh, 4)] == losses
    other = dict(fresh.model.named_parameters())
    assert all(p.equal(other[name]) for name, p in made.model.named_parameters())
    assert not any(path.suffix in (".pt", ".pth", ".bin", ".pkl", ".distcp") for path in tmp_path.iterdir())


def test_checkpoint_before_the_first_step(qwen2: Path, tmp_path: Path) -> None:
    made = rig.backend(qwen2)
    made.save(tmp_path)
    loss = step(made, 1)
    fresh = rig.backend(qwen2, model={"init": "random"})
    fresh.load(tmp_path)
    assert step(fresh, 1) == loss


def test_a_large_state_is_cut_into_files(qwen2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_files, "FILE_BYTES", 20_000)
    made = rig.backend(qwen2)
    step(made, 1)
    made.save(tmp_path)
    *_, last = parts = sorted(tmp_path.glob("rank-0*.safetensors"))
    assert len(parts) > 3
    fresh = rig.backend(qwen2, model={"init": "random"})
    fresh.load(tmp_path)
    assert step(fresh, 2) == step(made, 2)
    last.unlink()
    with pytest.raises(CheckpointError, match="not complete"):
        fresh.load(tmp_path)
    with pytest.raises(CheckpointError, match="rank 0 cannot write its part"):
        made.save(tmp_path / "nowhere")


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_what_a_snapshot_writes_is_the_state_that_it_was_taken_of(qwen2: Path, tmp_path: Path, lora) -> None:
    made, said = rig.backend(qwen2, lora=lora), []
    for number in (1, 2):  # the second copy takes the buffers of the first
        step(made, number)
        for name in ("saved", "copied"):
            (tmp_path / f"{name}-{number}").mkdir()
        made.save(tmp_path / f"saved-{number}")
        write = made.snapshot()
        buffers = {name: tensor.data_ptr() for name, tensor in made._copies._buffers.items()}
        step(made, 8)  # weights, moments and counters go on
        torch.rand(3)
        write(tmp_path / f"copied-{number}")
        said.append(files(tmp_path / f"copied-{number}"))
        assert said[-1] == files(tmp_path / f"saved-{number}")
        held = (*made.model.parameters(), *(v for s in made.optimizer.state.values() for v in s.values()))
        assert not {tensor.data_ptr() for tensor in held} & set(buffers.values())
    assert said[0] != said[1]
    assert buffers == {name: tensor.data_ptr() for name, tensor in made._copies._buffers.items()}


@pytest.mark.parametrize(("where", "value"), [("weight", torch.inf), ("weight", torch.nan), ("moment", -torch.inf)])
def test_what_is_not_finite_is_not_saved(qwen2: Path, tmp_path: Path, where: str, value: float) -> None:
    made = rig.backend(qwen2)
    step(made, 1)
    parameter = next(made.model.parameters())
    broken = parameter.data if where == "weight" else made.optimizer.state[parameter]["exp_avg"]
    broken.view(-1)[3] = value
    for save in (lambda: made.save(tmp_path), made.snapshot):
        with pytest.raises(NonFiniteError, match="is not finite, so the model is not saved"):
            save()
    assert list(tmp_path.iterdir()) == []


def test_checkpoints_that_do_not_fit(qwen2: Path, tmp_path: Path) -> None:
    made = rig.backend(qwen2)
    with pytest.raises(CheckpointError, match="no state of backend fsdp"):
        made.load(tmp_path)
    made.save(tmp_path)
    (tmp_path / "other").mkdir()
    from transformers import Qwen2Config, Qwen2ForCausalLM

    Qwen2ForCausalLM(Qwen2Config(**rig.SMALL | {"intermediate_size": 40})).save_pretrained(tmp_path / "other")
    with pytest.raises(CheckpointError, match="resume with the model that was saved"):
        rig.backend(tmp_path / "other").load(tmp_path)
    layout = json.loads((tmp_path / "rank-0.json").read_text())
    (tmp_path / "rank-0.json").write_text(json.dumps(layout | {"world_size": 2}))
    with pytest.raises(CheckpointError, match="not complete"):
        made.load(tmp_path)


def test_random_weights_derive_from_the_seed(qwen2: Path) -> None:
    state = torch.get_rng_state()
    one, two = (rig.backend(qwen2, model={"init": "random"}) for _ in range(2))
    assert torch.get_rng_state().equal(state)
    others = dict(two.model.named_parameters())
    assert all(p.equal(others[name]) for name, p in one.model.named_parameters())


def test_a_folder_that_lacks_weights(qwen2: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(qwen2)
    weights = {name: p for name, p in model.state_dict().items() if "q_proj" not in name}
    model.save_pretrained(tmp_path, state_dict=weights)
    with pytest.raises(UserError, match="lacks 4 weights"):
        rig.backend(tmp_path)


def test_export_and_weights(any_model: Path, tmp_path: Path) -> None:
    made = rig.backend(any_model)
    step(made, 1)
    folder = tmp_path / "model"
    made.export(folder)
    made.export(folder)  # a second one replaces the first
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    back = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    assert type(back) is type(made.model)
    ids = rig.batch().batch["input_ids"][:2]
    with torch.no_grad():
        torch.testing.assert_close(back(ids).logits, made.model(ids).logits, atol=1e-5, rtol=1e-5)
    assert json.loads((folder / "config.json").read_text()) == json.loads((any_model / "config.json").read_text())
    assert (folder / "generation_config.json").is_file()
    tokenizers = (AutoTokenizer.from_pretrained(path) for path in (folder, any_model))
    assert len({str(tokenizer("w5 w7")) for tokenizer in tokenizers}) == 1

    with safe_open(folder / "model.safetensors", framework="pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}
    manifest = Manifest({name: (tuple(tensor.shape), tensor.dtype) for name, tensor in stored.items()})
    aliases = {}
    with made.weights(bucket_bytes=5000) as stream:
        for bucket in stream:
            sent = [entry for entry in bucket.entries if entry.alias is None]
            assert bucket.version == 1
            assert len(bucket.entries) == 1 or sum(entry.nbytes for entry in sent) <= 5000
            for entry in sent:
                manifest.accept(entry)
                assert entry.tensor.equal(stored[entry.name])
            aliases |= {entry.name: entry.alias for entry in bucket.entries if entry.alias}
    manifest.complete()
    tied = made.model.config.tie_word_embeddings
    assert aliases == ({"lm_head.weight": "model.embed_tokens.weight"} if tied else {})
    with pytest.raises(ExpiredWeightsError):
        _ = entry.tensor


def test_exports_are_cut_into_files(any_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = rig.backend(any_model)
    made.export(tmp_path / "whole")
    monkeypatch.setattr(tensor_files, "FILE_BYTES", 10_000)
    made.export(tmp_path / "parts")
    index = json.loads((tmp_path / "parts" / "model.safetensors.index.json").read_text())
    files = {file.name for file in (tmp_path / "parts").glob("*.safetensors")}
    assert len(files) > 2 and files == set(index["weight_map"].values())
    one, other = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("whole", "parts"))
    assert all(p.equal(q) for p, q in zip(one.parameters(), other.parameters(), strict=True))
    stored = [tensor for name in files for tensor in load_file(tmp_path / "parts" / name).values()]
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in stored)


def test_an_export_that_fails_draws_what_others_gather(qwen2: Path, tmp_path: Path, monkeypatch: Any) -> None:
    made, drawn = rig.backend(qwen2), []

    def noted(model: Any, **how: Any) -> Iterator[WeightEntry]:
        for entry in entries(model, **how):
            drawn.append(entry.name)
            yield entry

    entries = names.entries
    monkeypatch.setattr(names, "entries", noted)
    made.export(tmp_path / "whole")
    everything = list(drawn)
    drawn.clear()
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        made.export(tmp_path / "file" / "model")
    assert drawn == everything


def test_memory_is_counted(qwen2: Path) -> None:
    made = rig.backend(qwen2)
    size = sum(p.numel() * 4 for p in made.model.parameters())
    assert made.memory() == {"parameters": size, "gradients": 0, "optimizer": 0}
    step(made, 1)
    assert made.memory()["optimizer"] == 2 * size + 4 * len(list(made.model.parameters()))
