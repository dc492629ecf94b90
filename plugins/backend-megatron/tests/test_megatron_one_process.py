"""What the backend does in one process, and what it refuses."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import megatron_learning as learning
import megatron_rig as rig
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from drivetrain import PluginError, RunError, UserError, get_registry
from drivetrain.config import ModelConfig, PluginConfig
from drivetrain.numerics import Counts
from drivetrain_backend_common import tensor_files
from drivetrain_backend_megatron.config import MegatronConfig

pytestmark = pytest.mark.usefixtures("groups_go")

OUTPUTS = ("log_probs", "entropy")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = rig.write_model("tied", tmp_path_factory.mktemp("model"))
    rig.write_tokenizer(made)
    return made


def test_random_weights_are_those_that_transformers_draws(folder: Path) -> None:
    found = learning.whole_weights(learning.backend(folder, model={"init": "random"}))
    torch.manual_seed(5)
    wanted = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    named = dict(wanted.named_parameters())
    assert found.keys() == named.keys() and all(named[name].equal(tensor) for name, tensor in found.items())


def test_a_model_that_does_not_learn_has_no_gradients(folder: Path) -> None:
    made = learning.backend(folder, learns=False)
    assert not any(p.requires_grad or hasattr(p, "main_grad") for piece in made.pieces for p in piece.parameters())
    data = learning.batch()
    made.forward(data, ("log_probs",), temperature=1.0)
    counts = Counts.of(data.batch["response_mask"], None)
    with pytest.raises(RunError, match="no optimizer"):
        made.update(data, learning.TERMS, counts, temperature=1.0, lr_factor=1.0)
    with pytest.raises(PluginError, match="does not compute"):
        made.forward(data, ("values",), temperature=1.0)
    with pytest.raises(UserError, match="temperature 0"):
        made.forward(data, ("log_probs",), temperature=0)


def test_two_models_of_a_process_do_not_mix(folder: Path) -> None:
    """A policy that learns, and its reference."""
    actor, ref = learning.backend(folder), learning.backend(folder, learns=False)
    data = learning.batch()
    before = ref.forward(data, ("log_probs",), temperature=1.0)["log_probs"]
    assert before.equal(actor.forward(data, ("log_probs",), temperature=1.0)["log_probs"])
    learning.update(actor, 0)
    assert not before.equal(actor.forward(data, ("log_probs",), temperature=1.0)["log_probs"])
    actor.close()
    assert before.equal(ref.forward(data, ("log_probs",), temperature=1.0)["log_probs"])


def test_tokens_in_smaller_parts_give_the_same(folder: Path) -> None:
    """Micro-batches, and chunks of logits."""
    data = learning.batch()
    many = learning.backend(folder, micro_batch_tokens=8, log_prob_chunk_tokens=3)
    few = learning.backend(folder, micro_batch_tokens=1000)
    a, b = (made.forward(data, OUTPUTS, temperature=0.7) for made in (many, few))
    assert all(torch.allclose(a[name], b[name], atol=3e-6) for name in OUTPUTS)
    assert all(bool((a[name][data.batch["attention_mask"][:, learning.PROMPT :] == 0] == 0).all()) for name in OUTPUTS)
    seen = [learning.update(made, 0) for made in (many, few)]
    assert seen[0] == pytest.approx(seen[1], rel=3e-6, abs=3e-6)
    a, b = (learning.whole_weights(made) for made in (many, few))
    assert all(torch.allclose(a[name], b[name], atol=1e-6) for name in a)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("distributed", [False, True])
def test_parts_come_back_from_the_host_as_they_were(folder: Path, distributed: bool, dtype: str) -> None:
    options = {"model": {"dtype": dtype}, "use_distributed_optimizer": distributed}
    stays = learning.backend(folder, **options)
    expected = [learning.update(stays, step) for step in range(2)]
    assert not stays.offloads
    for param, grad, optimizer in itertools.product((False, True), repeat=3):
        made = learning.backend(folder, **options, param_offload=param, grad_offload=grad, optimizer_offload=optimizer)
        assert made.offloads == {name for name, moves in (("parameters", param), ("optimizer", optimizer)) if moves}
        for step in range(2):
            assert learning.survive(made, made.offloads)
            assert (made.memory()["gradients"] == 0) == grad
            assert learning.update(made, step) == expected[step]
        assert all(a.equal(b) for a, b in zip(*(learning.parts(one)["parameters"] for one in (made, stays))))
        made.close()


def test_nothing_computes_while_parts_are_in_host_memory(folder: Path) -> None:
    made = learning.backend(folder, model={"dtype": "bfloat16"})
    learning.update(made, 0)
    held = made.memory()
    assert held["optimizer"] >= 3 * 4 * sum(tensor.numel() for tensor in learning.whole_weights(made).values())
    made.offload(["parameters"])
    assert made.memory() == held | {"parameters": 0}
    for call in (lambda: learning.update(made, 1), lambda: learning.whole_weights(made)):
        with pytest.raises(RunError, match="role 'actor' has its parameters in host memory"):
            call()
    made.onload(["parameters"])
    made.offload(["optimizer"])
    assert made.memory()["optimizer"] < 1000  # its counters of steps
    with pytest.raises(RunError, match="role 'actor' has its optimizer in host memory"):
        learning.update(made, 1)
    assert learning.whole_weights(made)
    with pytest.raises(PluginError, match="no part gradients to move; there are parameters, optimizer"):
        made.offload(["gradients"])


def test_a_reference_is_in_host_memory_between_calls(folder: Path) -> None:
    """It has no optimizer; its outputs are those before."""
    made = learning.backend(folder, learns=False, param_offload=True, optimizer_offload=True)
    data = learning.batch()
    before = made.forward(data, OUTPUTS, temperature=1.0)
    for _ in range(2):
        made.offload(made.offloads)
        assert made.memory() == {"parameters": 0, "gradients": 0, "optimizer": 0}
        with pytest.raises(RunError, match="role 'ref' has its parameters in host memory"):
            made.forward(data, OUTPUTS, temperature=1.0)
        made.onload(made.offloads)
        after = made.forward(data, OUTPUTS, temperature=1.0)
        assert all(after[name].equal(before[name]) for name in OUTPUTS)


@pytest.mark.parametrize("distributed", [False, True])
def test_bfloat16_weights_learn_through_float32_copies(folder: Path, distributed: bool) -> None:
    wanted = learning.expected(folder)
    before = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    made = learning.backend(folder, model={"dtype": "bfloat16"}, use_distributed_optimizer=distributed)
    found = made.forward(learning.batch(), ("log_probs",), temperature=learning.TEMPERATURE)["log_probs"]
    assert 0 < float((found - wanted.log_probs).abs().mean()) < 0.05
    assert found.dtype == torch.float32
    for step in range(learning.STEPS):
        learning.update(made, step)
    after = learning.whole_weights(made)
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}
    held = [p for part in made.optimizer.parts for group in part.optimizer.param_groups for p in group["params"]]
    assert {p.dtype for p in held} == {torch.float32}
    assert {p.main_grad.dtype for piece in made.pieces for p in piece.parameters()} == {torch.float32}
    assert sum(p.numel() for p in held) == sum(tensor.numel() for tensor in after.values())
    moved = torch.cat([(after[name].float() - tensor.bfloat16().float()).flatten() for name, tensor in before.items()])
    should = torch.cat([(wanted.weights[name] - tensor).flatten() for name, tensor in before.items()])
    assert float(torch.cosine_similarity(moved, should, dim=0)) > 0.8
    drift = max(float((after[name].float() - wanted.weights[name]).abs().max()) for name in before)
    assert drift < 0.03  # steps of 0.01 and 0.005, and the rounding of weights of up to 2


def test_exports_are_cut_into_files(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_files, "FILE_BYTES", 20_000)
    made = learning.backend(folder, learns=False)
    made.export(tmp_path / "model")
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    files = {file.name for file in (tmp_path / "model").glob("*.safetensors")}
    assert len(files) > 2 and files == set(index["weight_map"].values())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in learning.whole_weights(made).values())
    read, given = (AutoModelForCausalLM.from_pretrained(path) for path in (tmp_path / "model", folder))
    assert read.config.to_dict() | {"_name_or_path": ""} == given.config.to_dict() | {"_name_or_path": ""}
    assert all(p.equal(q) for p, q in zip(read.parameters(), given.parameters(), strict=True))


@pytest.mark.parametrize(
    "optimizer, critic, dtype, says",
    [
        ({"name": "muon"}, False, "float32", "trains with optimizer adamw"),
        ({"name": "adamw", "fused": True}, False, "float32", "chooses the kernel"),
        ({"name": "muon"}, True, "float32", "trains with optimizer adamw"),
        ({"name": "adamw"}, False, "float16", "does not train in float16"),
        ({"name": "adamw"}, False, "bfloat16", ""),
    ],
)
def test_settings_that_do_not_go_together_are_refused(
    folder: Path, optimizer: dict[str, Any], critic: bool, dtype: str, says: str
) -> None:
    section = MegatronConfig()
    run: Any = SimpleNamespace(
        actor=SimpleNamespace(backend=PluginConfig(name="other") if critic else section, optimizer=Fused(**optimizer)),
        model=ModelConfig(path=folder, dtype=dtype), ref=None, reward_model=None,
        critic=SimpleNamespace(backend=section, optimizer=Fused(**optimizer), model=None) if critic else None,
        processes_of={}.get,
    )  # fmt: skip
    found = list(section.check(run, get_registry()))
    assert [says in problem.what and bool(problem.mend) for problem in found] == [True] * bool(says)


def test_a_reward_model_of_another_family_is_refused_by_its_folder(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    section = MegatronConfig()
    run: Any = SimpleNamespace(
        actor=SimpleNamespace(backend=section, optimizer=Fused()), model=ModelConfig(path=folder), critic=None,
        ref=None, reward_model=SimpleNamespace(backend=section, model=ModelConfig(path=tmp_path)), processes_of={}.get,
    )  # fmt: skip
    (problem,) = section.check(run, get_registry())
    assert problem.what == f"{tmp_path}: backend megatron does not know models of type 'bert'"


def test_processes_that_the_sizes_do_not_divide_are_refused(folder: Path) -> None:
    section = MegatronConfig(tensor_model_parallel_size=2)
    run: Any = SimpleNamespace(
        actor=SimpleNamespace(backend=section, optimizer=Fused()), model=ModelConfig(path=folder), critic=None,
        ref=SimpleNamespace(backend=section, model=None), reward_model=None, processes_of={"actor": 3, "ref": 2}.get,
    )  # fmt: skip
    (problem,) = section.check(run, get_registry())
    assert problem.what.startswith("role actor: 3 processes are not a multiple of tensor 2")


class Fused(learning.Adam):
    """With a choice of kernels."""

    fused: bool | None = None
