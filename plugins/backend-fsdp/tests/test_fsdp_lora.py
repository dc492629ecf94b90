"""Adapters: what peft computes by itself, a reference without a second model, and small checkpoints."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import fsdp_ranks
import fsdp_rig as rig
import pytest
import torch
import torch.multiprocessing as multiprocessing
from peft import PeftModel
from pydantic import ValidationError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, GPT2Config, GPT2LMHeadModel

from drivetrain import CheckpointError, RunError, UserError
from drivetrain_backend_fsdp.config import FSDPConfig

LORA = {"rank": 4, "alpha": 6}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rig.write_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module", params=["llama", "qwen2", "mixtral"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rig.write_model(request.param, tmp_path_factory.mktemp(request.param))


def step(made, seed: int) -> float:
    data = rig.batch(seed=seed)
    return made.update(data, rig.TERMS, rig.counts(data), temperature=1.0, lr_factor=1.0)["loss"].result()


def stripped(named) -> dict[str, torch.Tensor]:
    return {name.removeprefix("base_model.model."): tensor for name, tensor in named}


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_checkpointing": True, "micro_batch_tokens": 40, "log_prob_chunk_tokens": 3}],
    ids=["whole", "parts"],
)
def test_loss_and_gradients_are_those_of_peft(llama: Path, options: dict) -> None:
    made, data = rig.adapted(llama, max_grad_norm=None, **options), rig.batch()
    theirs = rig.peft_like(made, rig.plain(llama))
    loss, gradients = rig.gradients(made, data, temperature=0.8)
    plain_loss, plain = rig.plain_gradients(llama, data, model=theirs, temperature=0.8)
    assert loss == pytest.approx(plain_loss, rel=1e-5)
    assert len(gradients) == 2 * 7 * 2  # A and B of seven linear layers in each of two blocks, and nothing else
    rig.assert_close(gradients, stripped(plain.items()), 2e-6)


def test_updates_are_those_of_peft_and_the_base_stays(llama: Path) -> None:
    made = rig.adapted(llama, max_grad_norm=0.5, optimizer={"eps": 1e-3, "weight_decay": 0.1})
    theirs = rig.peft_like(made, rig.plain(llama))
    learns = [p for p in theirs.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learns, lr=1e-2, eps=1e-3, weight_decay=0.1)
    before = theirs.state_dict()
    for seed in range(3):
        data = rig.batch(seed=seed)
        metrics = made.update(data, rig.TERMS, rig.counts(data), temperature=1.0, lr_factor=1.0)
        loss, _ = rig.plain_gradients(llama, data, model=theirs)
        norm = torch.nn.utils.clip_grad_norm_(learns, 0.5)
        assert metrics["loss"].result() == pytest.approx(loss, rel=1e-4)
        assert metrics["grad_norm"].result() == pytest.approx(float(norm), rel=1e-4)
        optimizer.step()
        optimizer.zero_grad()
    after = stripped(theirs.state_dict().items())
    for name, tensor in made.model.state_dict().items():
        torch.testing.assert_close(tensor, after[name], atol=2e-6, rtol=0)
        if ".lora_" not in name:
            assert tensor.equal(stripped(before.items())[name])


def test_only_the_adapter_learns_in_float32(llama: Path) -> None:
    made = rig.adapted(llama, model={"dtype": "bfloat16"}, lora={"targets": ("q_proj", "mlp.down_proj")})
    learns = {name: p for name, p in made.model.named_parameters() if p.requires_grad}
    assert {name.split(".lora_")[0].split(".", 3)[3] for name in learns} == {"self_attn.q_proj", "mlp.down_proj"}
    held = [p for group in made.optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in held} == {id(p) for p in learns.values()} and len(learns) == 8
    assert {p.dtype for p in learns.values()} == {torch.float32}
    assert {p.dtype for p in made.model.parameters() if not p.requires_grad} == {torch.bfloat16}
    step(made, 1)
    size = sum(p.numel() * 4 for p in learns.values())
    assert made.memory()["optimizer"] == 2 * size + 4 * len(learns)


def test_training_starts_with_the_model_as_it_was_and_the_reference_stays_there(llama: Path) -> None:
    data = rig.batch()
    base = rig.backend(llama, learns=False).forward(data, ["log_probs", "entropy"], temperature=0.7)
    made = rig.backend(llama, lora=LORA)
    start = made.forward(data, ["log_probs", "entropy"], temperature=0.7)
    assert all(start[name].equal(base[name]) for name in base)
    step(made, 1), step(made, 2)
    reference = made.reference_forward(data, ["log_probs", "entropy"], temperature=0.7)
    assert all(reference[name].equal(base[name]) for name in base)
    moved = made.forward(data, ["log_probs"], temperature=0.7)["log_probs"]
    assert float((moved - base["log_probs"]).abs().max()) > 0.05
    one, two = rig.gradients(made, data), rig.gradients(made, data)  # the adapter is on again, and learns
    assert one[0] == two[0] and len(one[1]) == 28
    with pytest.raises(RunError, match="without an adapter"):
        rig.backend(llama).reference_forward(data, ["log_probs"], temperature=1.0)


def test_ranks_and_roles_draw_adapters_from_the_seed_alone(llama: Path) -> None:
    state = torch.get_rng_state()
    one, two = (dict(rig.backend(llama, lora=LORA).model.named_parameters()) for _ in range(2))
    assert torch.get_rng_state().equal(state)
    assert all(p.equal(two[name]) for name, p in one.items())
    drawn = [p for name, p in one.items() if ".lora_A." in name]
    assert all(float(p.detach().std()) > 0.01 for p in drawn) and not drawn[0].equal(drawn[1])
    assert not any(bool(p.any()) for name, p in one.items() if ".lora_B." in name)


def test_weights_leave_merged_under_their_names(family: Path, tmp_path: Path) -> None:
    made = rig.adapted(family)
    step(made, 1)
    before = {name: p.clone() for name, p in made.model.state_dict().items()}
    merged = rig.peft_like(made, rig.plain(family)).merge_and_unload()
    merged.save_pretrained(tmp_path / "theirs")
    stored = load_file(tmp_path / "theirs" / "model.safetensors")
    ours, largest = {}, 0
    with made.weights(bucket_bytes=5000) as stream:
        for bucket in stream:
            assert (bucket.kind, bucket.version) == ("full", 1)
            largest = max(largest, len(bucket.entries))
            ours |= {entry.name: entry.tensor.clone() for entry in bucket.entries if not entry.alias}
    assert ours.keys() == stored.keys()
    for name, tensor in stored.items():
        torch.testing.assert_close(ours[name], tensor, atol=1e-6, rtol=1e-6)
    assert any(not tensor.equal(load_file(family / "model.safetensors")[name]) for name, tensor in ours.items())
    made.export(tmp_path / "ours")
    exported = load_file(tmp_path / "ours" / "model.safetensors")
    assert all(tensor.equal(ours[name]) for name, tensor in exported.items()) and exported.keys() == ours.keys()
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    ids = rig.batch().batch["input_ids"][:2]
    with torch.no_grad():
        torch.testing.assert_close(back(ids).logits, made.live_module()(ids).logits, atol=2e-5, rtol=1e-5)
    assert all(p.equal(before[name]) for name, p in made.model.state_dict().items())
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert config == json.loads((family / "config.json").read_text())


def test_the_adapter_leaves_alone_under_the_names_of_peft(family: Path, tmp_path: Path) -> None:
    """``W + B A`` is the weight that leaves merged, and peft's files have the same names and the same A."""
    made = rig.adapted(family, lora={"export": "adapter"})
    step(made, 1)
    with made.weights(bucket_bytes=1 << 30) as stream:
        merged = {entry.name: entry.tensor.clone() for bucket in stream for entry in bucket.entries if not entry.alias}
    base, alone, kinds = load_file(family / "model.safetensors"), {}, []
    with made.adapter(bucket_bytes=2000) as stream:
        for bucket in stream:
            kinds.append((bucket.kind, bucket.version))
            alone |= {entry.name: entry.tensor.clone() for entry in bucket.entries}
    assert len(kinds) > 3 and set(kinds) == {("adapter", 1)}
    made.export(tmp_path / "adapter")
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert alone.keys() == stored.keys()
    for name in (name for name in alone if name.endswith(".lora_A.weight")):
        other = name.replace(".lora_A.", ".lora_B.")
        assert alone[name].equal(stored[name]) and alone[other].equal(stored[other] * 1.5)
        weight = f"{name.removeprefix('base_model.model.').removesuffix('.lora_A.weight')}.weight"
        torch.testing.assert_close(base[weight] + alone[other] @ alone[name], merged[weight], atol=1e-6, rtol=1e-6)
        assert not merged[weight].equal(base[weight])
    with pytest.raises(TypeError, match="does not offer backend.adapter"):
        rig.backend(family).adapter(bucket_bytes=1)


def test_the_adapter_alone_is_exported_for_peft(llama: Path, tmp_path: Path) -> None:
    made = rig.adapted(llama, lora={"export": "adapter"})
    step(made, 1)
    made.export(tmp_path / "adapter")
    assert {path.name for path in (tmp_path / "adapter").iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors"
    }  # fmt: skip
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 6, str(llama))
    theirs = PeftModel.from_pretrained(rig.plain(llama), tmp_path / "adapter")
    ids = rig.batch().batch["input_ids"][:2]
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, made.model(ids).logits, atol=2e-5, rtol=1e-5)


def test_checkpoints_are_small_and_resuming_continues_bit_for_bit(llama: Path, tmp_path: Path) -> None:
    made = rig.backend(llama, lora=LORA)
    step(made, 1), step(made, 2)
    made.save(tmp_path)
    held = load_file(tmp_path / "rank-0.safetensors")
    kinds = {name.split(".")[0] for name in held}
    assert kinds == {"model", "optimizer", "rng"}
    assert all(".lora_" in name for name in held if not name.startswith("rng."))
    learns = sum(p.numel() for p in made.model.parameters() if p.requires_grad)
    numbers = [tensor.numel() for name, tensor in held.items() if not name.startswith("rng.") and tensor.dim()]
    assert sum(numbers) == 3 * learns  # the adapter and its two moments
    losses = [step(made, 3), step(made, 4)]
    fresh = rig.backend(llama, lora=LORA)
    step(fresh, 9)
    fresh.load(tmp_path)
    assert [step(fresh, 3), step(fresh, 4)] == losses
    other = dict(fresh.model.named_parameters())
    assert all(p.equal(other[name]) for name, p in made.model.named_parameters())


def test_a_checkpoint_belongs_to_its_base_and_its_adapter(llama: Path, tmp_path: Path) -> None:
    rig.backend(llama, lora=LORA).save(tmp_path)
    changed = rig.plain(llama)
    with torch.no_grad():
        changed.model.layers[1].mlp.up_proj.weight[0, 3] += 1e-3
    changed.save_pretrained(tmp_path / "changed")
    for folder, lora, message in (
        (tmp_path / "changed", LORA, "was trained on other weights"),
        (llama, LORA | {"alpha": 7}, "another alpha / rank"),
        (llama, LORA | {"targets": ("q_proj",)}, "other layers"),
        (llama, {"rank": 8, "alpha": 12}, "resume with the model that was saved"),
        (llama, None, "holds an adapter; the model has none"),
    ):
        with pytest.raises(CheckpointError, match=message):
            rig.backend(folder, lora=lora).load(tmp_path)
    (tmp_path / "full").mkdir()
    rig.backend(llama).save(tmp_path / "full")
    with pytest.raises(CheckpointError, match="holds no adapter; the model has one"):
        rig.backend(llama, lora=LORA).load(tmp_path / "full")


def test_a_critic_learns_its_adapter_and_its_head(llama: Path, tmp_path: Path) -> None:
    made, data = rig.adapted(llama, role="critic", max_grad_norm=None, lora={"export": "adapter"}), rig.critic_batch()
    theirs = rig.peft_like(made, rig.plain(llama))
    weight = rig.head(made).requires_grad_()
    bias = torch.full((1,), 0.3, requires_grad=True)
    trunk = theirs.base_model.model.model
    mask = data.batch["response_mask"] == 1
    new, old, returns = (
        column[mask] for column in (rig.plain_values(trunk, weight, bias, data), data["values"], data["returns"])
    )
    clipped = torch.minimum(torch.maximum(new, old - 0.4), old + 0.4)
    loss = 0.5 * torch.maximum((new - returns) ** 2, (clipped - returns) ** 2).mean()
    loss.backward()
    want = {f"model.{name}": p.grad for name, p in trunk.named_parameters() if p.requires_grad}
    got_loss, got = rig.gradients(made, data, rig.VALUE_TERMS)
    assert got_loss == pytest.approx(float(loss.detach()), rel=1e-5)
    rig.assert_close(got, want | {"score.weight": weight.grad, "score.bias": bias.grad}, 2e-6)

    (tmp_path / "state").mkdir()
    made.save(tmp_path / "state")
    values = made.forward(data, ["values"], temperature=1.0)["values"]
    fresh = rig.backend(llama, role="critic", lora=LORA)
    fresh.load(tmp_path / "state")
    assert fresh.forward(data, ["values"], temperature=1.0)["values"].equal(values)
    made.export(tmp_path / "adapter")
    base = AutoModelForTokenClassification.from_pretrained(llama, num_labels=1, dtype=torch.float32)
    peft = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    ids = data.batch["input_ids"][:2]
    with torch.no_grad():
        torch.testing.assert_close(peft(ids).logits, made.model(ids).logits, atol=2e-5, rtol=1e-5)
    fresh.export(tmp_path / "merged")
    merged = AutoModelForTokenClassification.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, made.model(ids).logits, atol=2e-5, rtol=1e-5)


def test_two_ranks_equal_one(llama: Path, tmp_path: Path) -> None:
    one = rig.adapted(llama, max_grad_norm=0.5)
    data = rig.batch()
    forward = one.forward(data, ["log_probs", "entropy"], temperature=0.8)
    reference = one.reference_forward(data, ["log_probs"], temperature=0.8)["log_probs"]
    updates = [fsdp_ranks.update(one, slice(None), factor) for factor in (1.0, 0.5, 1.0)]
    weights = fsdp_ranks.whole_weights(one)
    (tmp_path / "one").mkdir()
    one.save(tmp_path / "one")
    following = fsdp_ranks.update(one, slice(None))

    multiprocessing.spawn(fsdp_ranks.lora_work, (llama, tmp_path, tmp_path / "one"), nprocs=2)
    ranks = [torch.load(tmp_path / f"seen-{rank}.pt") for rank in range(2)]
    for name in forward:
        together = torch.cat([rank["forward"][name] for rank in ranks])
        torch.testing.assert_close(together, forward[name], atol=1e-5, rtol=0)
    for when in ("first", "last"):  # the reference does not learn
        together = torch.cat([rank[f"reference_{when}"] for rank in ranks])
        torch.testing.assert_close(together, reference, atol=1e-5, rtol=0)
    for rank in ranks:
        assert rank["sharded"] == 28
        for got, want in zip([*rank["updates"], rank["next"]], [*updates, following], strict=True):
            assert got == pytest.approx(want, rel=5e-5)
        assert rank["weights"].keys() == weights.keys()
        lent, split = fsdp_ranks.joined([rank["shards"] for rank in ranks])
        assert split == len(lent) == len(weights)
        for name, tensor in lent.items():
            torch.testing.assert_close(tensor, rank["weights"][name], atol=1e-6, rtol=1e-6)
        for name, tensor in weights.items():
            torch.testing.assert_close(rank["weights"][name], tensor, atol=1e-5, rtol=0)
        assert rank["again"] == rank["next"]
        assert rank["from_one"] == pytest.approx(following, rel=5e-5)
        assert all(map(torch.isfinite, map(torch.tensor, rank["bfloat16"].values())))
    assert "other weights" in ranks[0]["refused"]

    resumed = rig.backend(llama, max_grad_norm=0.5, lora=LORA)
    resumed.load(tmp_path / "state")  # written by two processes
    assert fsdp_ranks.update(resumed, slice(None)) == pytest.approx(following, rel=5e-5)
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert all(tensor.equal(ranks[0]["weights"][name]) for name, tensor in exported.items())
    alone = PeftModel.from_pretrained(rig.plain(llama), tmp_path / "adapter").merge_and_unload()
    for name, tensor in alone.state_dict().items():
        torch.testing.assert_close(ranks[0]["weights"][name], tensor, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("targets", "message"),
    [(("q_prj",), "choose from down_proj, gate_proj"), (("lm_head",), "the output layer has no adapter")],
)
def test_unknown_targets(llama: Path, targets: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        rig.backend(llama, lora={"targets": targets})


def test_a_model_without_linear_layers(tmp_path: Path) -> None:
    GPT2LMHeadModel(GPT2Config(vocab_size=rig.VOCAB, n_embd=16, n_layer=1, n_head=2)).save_pretrained(tmp_path)
    rig.tokenizer(tmp_path)
    with pytest.raises(UserError, match="hold no linear layer"):
        rig.backend(tmp_path, lora=LORA)


def test_settings_that_do_not_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ({"rank": 0}, {"targets": "q_proj"}, {"targets": ()}, {"dropout": 0.1}):
        with pytest.raises(ValidationError):
            FSDPConfig(lora=wrong)
    adapted, plain = FSDPConfig(lora={"export": "adapter"}), FSDPConfig()

    def problems(section: FSDPConfig, actor: FSDPConfig = adapted, critic: FSDPConfig | None = None, init="pretrained"):
        run = SimpleNamespace(
            model=SimpleNamespace(init=init), reward_model=None, actor=SimpleNamespace(backend=actor),
            critic=critic and SimpleNamespace(backend=critic),
        )  # fmt: skip
        return [(problem.key, problem.what) for problem in section.check(run, None)]

    assert problems(adapted) == problems(adapted, plain, adapted) == problems(plain) == []
    assert problems(adapted, plain, plain) == [("lora", "this model does not learn, so it has no adapter")]
    [(key, what)] = problems(adapted, init="random")
    assert key == "lora.export" and "is in no folder" in what
    monkeypatch.setitem(sys.modules, "peft", None)
    assert problems(adapted) == [("lora", "adapters need peft, not installed here")]
    assert problems(plain, plain) == []


def test_peft_is_missing(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match=r"pip install 'drivetrain-backend-fsdp\[lora\]'"):
        rig.backend(llama, lora=LORA)
    rig.backend(llama)  # needs none


def test_what_does_not_learn_has_no_adapter(llama: Path) -> None:
    made = rig.backend(llama, lora=LORA, learns=False)
    assert not any(".lora_" in name for name, _ in made.model.named_parameters())


def test_what_the_adapter_offers() -> None:
    assert FSDPConfig(lora={}).provided_capabilities() == ("backend.reference", "backend.adapter")
    assert FSDPConfig().provided_capabilities() == ()
