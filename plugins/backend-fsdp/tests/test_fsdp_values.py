"""A critic: values from packed rows, their gradients, and its state."""

from pathlib import Path

import fsdp_ranks
import fsdp_rig as rig
import pytest
import torch
import torch.multiprocessing as multiprocessing
from transformers import AutoModelForTokenClassification, AutoTokenizer

from drivetrain import PluginError, UserError


def update(made, data=None, lr_factor: float = 1.0) -> dict[str, float]:
    data = rig.critic_batch() if data is None else data
    metrics = made.update(data, rig.VALUE_TERMS, rig.counts(data), temperature=1.0, lr_factor=lr_factor)
    return {name: metric.result() for name, metric in metrics.items()}


def gradients(made, data=None):
    return rig.gradients(made, rig.critic_batch() if data is None else data, rig.VALUE_TERMS)


def test_equal_transformers_row_by_row(any_model: Path) -> None:
    data = rig.batch()
    made = rig.critic(any_model, learns=False, micro_batch_tokens=40)
    values = made.forward(data, ["values"], temperature=1.0)["values"]
    trunk, weight = rig.plain(any_model).model, rig.head(made)
    for row in range(len(data)):
        real = data.batch["attention_mask"][row] == 1
        prompt, total = int(real[: rig.PROMPT].sum()), int(real.sum())
        with torch.no_grad():
            hidden = trunk(input_ids=data.batch["input_ids"][row][real][None], use_cache=False).last_hidden_state[0]
        want = torch.zeros(rig.RESPONSE)
        want[: total - prompt] = hidden[prompt - 1 : total - 1] @ weight[0] + 0.3  # before each response token
        torch.testing.assert_close(values[row], want, atol=1e-5, rtol=1e-5)


def test_gradients_equal_plain_pytorch(any_model: Path) -> None:
    data = rig.critic_batch()
    made = rig.critic(any_model, max_grad_norm=None, micro_batch_tokens=40)
    trunk, weight = rig.plain(any_model).model, rig.head(made).requires_grad_()
    bias = torch.full((1,), 0.3, requires_grad=True)
    mask = data.batch["response_mask"] == 1
    new, old, returns = (
        column[mask] for column in (rig.plain_values(trunk, weight, bias, data), data["values"], data["returns"])
    )
    clipped = torch.minimum(torch.maximum(new, old - 0.4), old + 0.4)
    assert 0.1 < float((clipped != new).float().mean()) < 1
    loss = 0.5 * torch.maximum((new - returns) ** 2, (clipped - returns) ** 2).mean()
    loss.backward()
    want = {f"model.{name}": p.grad for name, p in trunk.named_parameters()}
    got_loss, got = gradients(made)
    assert got_loss == pytest.approx(float(loss.detach()), rel=1e-5)
    rig.assert_close(got, want | {"score.weight": weight.grad, "score.bias": bias.grad}, 2e-6)


@pytest.mark.parametrize("options", [{"micro_batch_tokens": 1}, {"gradient_checkpointing": True}])
def test_gradients_do_not_depend_on_options(qwen2: Path, options: dict) -> None:
    loss, want = gradients(rig.critic(qwen2, max_grad_norm=None))
    got_loss, got = gradients(rig.critic(qwen2, max_grad_norm=None, **options))
    assert got_loss == pytest.approx(loss, rel=1e-5)
    rig.assert_close(got, want)


def test_neither_padding_nor_masked_content_matters(qwen2: Path) -> None:
    made, data = rig.critic(qwen2, max_grad_norm=None), rig.critic_batch()
    _, want = gradients(made)
    _, wide = gradients(made, rig.critic_batch(prompt=12, response=15))
    rig.assert_close(wide, want)
    _, filled = gradients(made, data.with_columns(**{k: data[k].nan_to_num(0.0) for k in ("values", "returns")}))
    rig.assert_close(filled, want, 0)
    values = made.forward(data, ["values"], temperature=1.0)["values"]
    hot = made.forward(data, ["values"], temperature=2.0)["values"]
    assert hot.equal(values)  # the temperature is one of logits


def test_a_new_head_is_small_and_the_same_everywhere(qwen2: Path) -> None:
    one, two = (rig.backend(qwen2, role="critic") for _ in range(2))
    assert one.model.score.weight.equal(two.model.score.weight) and not one.model.score.bias.any()
    assert one.model.score.weight.std().item() == pytest.approx(1 / 33, rel=0.5)
    drawn = rig.backend(qwen2, role="critic", model={"init": "random"})
    assert drawn.model.score.weight.equal(one.model.score.weight)
    assert not drawn.model.model.embed_tokens.weight.equal(one.model.model.embed_tokens.weight)


def test_bfloat16_compute_is_close(qwen2: Path) -> None:
    fine = rig.critic(qwen2, learns=False).forward(rig.batch(), ["values"], temperature=1.0)["values"]
    made = rig.critic(qwen2, learns=False, compute_dtype="bfloat16")
    coarse = made.forward(rig.batch(), ["values"], temperature=1.0)["values"]
    assert coarse.dtype == torch.float32 and 0 < float((fine - coarse).abs().mean()) < 0.1


def test_resumed_training_continues_bit_for_bit(qwen2: Path, tmp_path: Path) -> None:
    made = rig.critic(qwen2)
    update(made)
    made.save(tmp_path)
    following = [update(made), update(made)]
    fresh = rig.backend(qwen2, role="critic", model={"init": "random"})
    fresh.load(tmp_path)
    assert [update(fresh), update(fresh)] == following


def test_an_exported_critic_is_a_token_classifier(any_model: Path, tmp_path: Path) -> None:
    made = rig.critic(any_model)
    update(made)
    made.export(tmp_path / "critic")
    values = made.forward(rig.batch(), ["values"], temperature=1.0)["values"]
    again = rig.backend(tmp_path / "critic", role="critic")
    ours = dict(made.model.named_parameters())
    assert all(p.equal(ours[name]) for name, p in again.model.named_parameters())
    same = again.forward(rig.batch(), ["values"], temperature=1.0)["values"]
    torch.testing.assert_close(same, values, atol=1e-5, rtol=0)  # rounding depends on where weights lie in memory
    tokenizers = (AutoTokenizer.from_pretrained(path) for path in (tmp_path / "critic", any_model))
    assert len({str(tokenizer("w5 w7")) for tokenizer in tokenizers}) == 1
    if "gemma3" not in any_model.name:  # transformers has no class for it
        model = AutoModelForTokenClassification.from_pretrained(tmp_path / "critic", attn_implementation="eager")
        own = rig.plain_values(model.model, model.score.weight, model.score.bias, rig.batch()).detach()
        real = rig.batch().batch["attention_mask"][:, rig.PROMPT :] == 1
        torch.testing.assert_close(values[real], own[real], atol=1e-5, rtol=1e-5)


def test_a_reward_model_gives_its_head(qwen2: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    judge = AutoModelForSequenceClassification.from_pretrained(qwen2, num_labels=1)
    judge.save_pretrained(tmp_path)
    assert rig.backend(tmp_path, role="critic").model.score.weight.equal(judge.score.weight)


def test_what_is_wrong_is_said(qwen2: Path, tmp_path: Path) -> None:
    model = AutoModelForTokenClassification.from_pretrained(qwen2, num_labels=3)
    model.save_pretrained(tmp_path / "three")
    with pytest.raises(UserError, match="classifier of 3 labels"):
        rig.backend(tmp_path / "three", role="critic")
    weights = {name: p for name, p in model.state_dict().items() if "score" not in name}
    model.config.num_labels = 1
    model.save_pretrained(tmp_path / "headless", state_dict=weights)
    with pytest.raises(UserError, match="lacks 2 weights"):
        rig.backend(tmp_path / "headless", role="critic")
    made, data = rig.critic(qwen2), rig.batch()
    with pytest.raises(PluginError, match="does not compute .*log_probs.* role critic"):
        made.forward(data, ["log_probs"], temperature=1.0)
    with pytest.raises(PluginError, match="'clip' needs .*log_probs.* gives values"):
        made.update(data, rig.TERMS, rig.counts(data), temperature=1.0, lr_factor=1.0)
    with pytest.raises(PluginError, match="'value_clip' needs .*values"):
        rig.backend(qwen2).update(data, rig.VALUE_TERMS, rig.counts(data), temperature=1.0, lr_factor=1.0)


def test_two_ranks_equal_one(qwen2: Path, tmp_path: Path) -> None:
    one = rig.critic(qwen2, max_grad_norm=0.5, optimizer={"eps": 1e-3})
    values = one.forward(rig.batch(), ["values"], temperature=1.0)["values"]
    updates = [update(one), update(one), update(one)]
    weights = fsdp_ranks.whole_weights(one)
    (tmp_path / "one").mkdir()
    one.save(tmp_path / "one")
    following = update(one)
    multiprocessing.spawn(fsdp_ranks.critic_work, (qwen2, tmp_path, tmp_path / "one"), nprocs=2)
    ranks = [torch.load(tmp_path / f"seen-{rank}.pt") for rank in range(2)]
    torch.testing.assert_close(torch.cat([rank["values"] for rank in ranks]), values, atol=1e-5, rtol=0)
    for rank in ranks:
        for got, want in zip([*rank["updates"], rank["next"], rank["from_one"]], [*updates, following, following]):
            assert got == pytest.approx({name: want[name] for name in got}, rel=5e-5)
        assert rank["again"] == rank["next"]
        for name, tensor in weights.items():
            torch.testing.assert_close(rank["weights"][name], tensor, atol=1e-5, rtol=0)
    resumed = rig.backend(qwen2, role="critic", max_grad_norm=0.5, model={"init": "random"}, optimizer={"eps": 1e-3})
    resumed.load(tmp_path / "state")  # written by two processes
    assert update(resumed) == pytest.approx(following, rel=5e-5)
    exported = rig.backend(tmp_path / "export", role="critic")
    assert all(p.equal(ranks[0]["weights"][name]) for name, p in exported.model.named_parameters())
