"""Critics and reward models in one process: where their heads come from, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import megatron_judging as judging
import megatron_learning as learning
import megatron_rig as rig
import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from drivetrain import DataProto, PluginError, RunError, UserError
from drivetrain.numerics import Counts

pytestmark = pytest.mark.usefixtures("groups_go")


@pytest.fixture(scope="module")
def language(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model whose output layer is its embedding."""
    made = rig.write_model("tied", tmp_path_factory.mktemp("language"), num_hidden_layers=2)
    rig.write_tokenizer(made)
    return made


@pytest.fixture(scope="module")
def critic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return judging.write("qwen3", tmp_path_factory.mktemp("critic"), "Token", num_hidden_layers=2)


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return judging.write("llama", tmp_path_factory.mktemp("judge"), "Sequence", num_hidden_layers=2)


def weights_of(folder: Path, role: str = "critic", **options: Any) -> dict[str, Tensor]:
    made = judging.backend(role, folder, **options)
    found = learning.whole_weights(made)
    made.close()
    return found


def headless(kind: Any, folder: Path, to: Path) -> Path:
    """A folder of a classifier without its last layer."""
    model = kind.from_pretrained(folder)
    model.save_pretrained(to, state_dict={name: p for name, p in model.state_dict().items() if "score" not in name})
    return to


def test_a_new_head_is_small_and_of_the_seed_alone(language: Path) -> None:
    found = weights_of(language)
    trunk = dict(AutoModelForCausalLM.from_pretrained(language).model.named_parameters())
    assert found.keys() == {f"model.{name}" for name in trunk} | {"score.weight", "score.bias"}
    assert all(found[f"model.{name}"].equal(tensor) for name, tensor in trunk.items())
    assert found["score.weight"].shape == (1, 32) and not found["score.bias"].any()
    assert found["score.weight"].std().item() == pytest.approx(1 / 33, rel=0.5)

    drawn = weights_of(language, model={"init": "random"})
    torch.manual_seed(5)
    config = AutoConfig.from_pretrained(language, num_labels=1)
    wanted = dict(AutoModelForTokenClassification.from_config(config, dtype=torch.float32).named_parameters())
    for name in ("score.weight", "score.bias"):
        assert drawn[name].equal(found[name])
        del wanted[name]
    assert all(drawn[name].equal(tensor) for name, tensor in wanted.items())


def test_a_head_is_read_where_the_folder_has_one(critic: Path, tmp_path: Path) -> None:
    read = AutoModelForTokenClassification.from_pretrained(critic)
    found = weights_of(critic)
    assert found["score.weight"].equal(read.score.weight) and found["score.bias"].equal(read.score.bias)
    model = judging.write("qwen2", tmp_path, "Sequence", num_hidden_layers=2, num_labels=1)
    found = weights_of(model)  # a reward model, which has no bias
    assert found["score.weight"].equal(AutoModelForSequenceClassification.from_pretrained(model).score.weight)
    assert not found["score.bias"].any()


def test_values_depend_on_nothing_but_the_tokens(critic: Path) -> None:
    """Not on micro-batches, the temperature, padding, or what stands where nothing may look."""
    data = judging.batch()
    few, many = (judging.backend("critic", critic, micro_batch_tokens=tokens) for tokens in (1000, 8))
    values = few.forward(data, ("values",), temperature=1.0)["values"]
    assert values.equal(few.forward(data, ("values",), temperature=2.0)["values"])
    assert values[data.batch["attention_mask"][:, learning.PROMPT :] == 0].eq(0).all()
    torch.testing.assert_close(many.forward(data, ("values",), temperature=1.0)["values"], values, atol=3e-6, rtol=0)
    assert judging.update(few, 0) == pytest.approx(judging.update(many, 0), rel=3e-6)
    a, b = learning.whole_weights(few), learning.whole_weights(many)
    assert all(torch.allclose(a[name], b[name], atol=1e-6) for name in a)


def test_half_precision_is_close(critic: Path, judge: Path) -> None:
    data, half = judging.batch(), {"model": {"dtype": "bfloat16"}}
    for role, folder, rows, name in (("critic", critic, data, "values"), ("reward", judge, judging.texts(), "scores")):
        fine, coarse = (judging.backend(role, folder, **options).forward(rows, (name,), temperature=1.0)[name]
                        for options in ({}, half))  # fmt: skip
        assert coarse.dtype == torch.float32 and 0 < float((fine - coarse).abs().mean()) < 0.1
    made = judging.backend("critic", critic, use_distributed_optimizer=True, **half)
    before = learning.whole_weights(made)["score.bias"]
    judging.update(made, 0)
    assert not learning.whole_weights(made)["score.bias"].equal(before)


def test_a_critic_comes_back_from_the_host_as_it_was(critic: Path) -> None:
    made = judging.backend("critic", critic, param_offload=True, grad_offload=True, optimizer_offload=True)
    stays = judging.backend("critic", critic)
    for step in range(len(judging.FACTORS)):
        made.offload(made.offloads)
        assert made.memory()["parameters"] == 0
        made.onload(made.offloads)
        assert judging.update(made, step) == judging.update(stays, step)


def test_what_is_no_critic_is_refused(critic: Path, judge: Path, language: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"classifier of 3 labels; a critic has one \(critic.model.path\)"):
        judging.backend("critic", judge)
    with pytest.raises(UserError, match="has no tensor score.weight"):
        judging.backend("critic", headless(AutoModelForTokenClassification, critic, tmp_path))
    made, data = judging.backend("critic", critic), judging.batch()
    counts = Counts.of(data.batch["response_mask"], None)
    with pytest.raises(PluginError, match="does not compute .*log_probs.* role critic"):
        made.forward(data, ("log_probs",), temperature=1.0)
    with pytest.raises(PluginError, match="'clip' needs .*log_probs.* gives values"):
        made.update(data, learning.TERMS, counts, temperature=1.0, lr_factor=1.0)
    with pytest.raises(PluginError, match="'value_clip' needs .*values"):
        learning.backend(language).update(data, judging.TERMS, counts, temperature=1.0, lr_factor=1.0)


def test_what_is_no_reward_model_is_refused(judge: Path, language: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"Qwen2ForCausalLM, which has no classification head .reward_model.model.path"):
        judging.backend("reward", language)
    with pytest.raises(UserError, match=r"has no tensor score.weight \(reward_model.model.path\)"):
        judging.backend("reward", headless(AutoModelForSequenceClassification, judge, tmp_path))
    with pytest.raises(UserError, match=r"is no folder \(reward_model.model.path\)"):
        judging.backend("reward", tmp_path / "nowhere")
    made = judging.backend("reward", judge)
    assert not any(p.requires_grad for piece in made.pieces for p in piece.parameters())
    with pytest.raises(PluginError, match="does not compute .*values.* role reward"):
        made.forward(judging.texts(), ("values",), temperature=1.0)
    with pytest.raises(RunError, match="'reward' has no optimizer"):
        data = judging.batch()
        made.update(data, judging.TERMS, Counts.of(data.batch["response_mask"], None), temperature=1.0, lr_factor=1.0)
    ids, real = torch.tensor([[5, 6], [70, 7]]), torch.tensor([[1, 1], [1, 0]])
    with pytest.raises(UserError, match=r"token 70 is not among the 51 tokens.* \(reward_model.model.tokenizer\)"):
        rows = DataProto.from_dict({"input_ids": ids, "attention_mask": real})
        made.forward(rows, ("scores",), temperature=1.0)
    with pytest.raises(RunError, match="a text has no token"):
        rows = DataProto.from_dict({"input_ids": ids, "attention_mask": real * 0})
        made.forward(rows, ("scores",), temperature=1.0)
