"""Updates: gradients, what they do not depend on, and what stops them."""

from pathlib import Path

import fsdp_rig as rig
import pytest
import torch

from drivetrain import LossTerm, NonFiniteError, PluginError, UserError
from drivetrain_backend_common import objective
from drivetrain_backend_common.rows import micro_batches


def test_gradients_equal_plain_pytorch(any_model: Path) -> None:
    data = rig.batch()
    loss, want = rig.plain_gradients(any_model, data)
    made = rig.backend(any_model, max_grad_norm=None, micro_batch_tokens=40, log_prob_chunk_tokens=5)
    got_loss, got = rig.gradients(made, data)
    assert got_loss == pytest.approx(loss, rel=1e-5)
    rig.assert_close(got, want, 2e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"micro_batch_tokens": 1},
        {"micro_batch_tokens": 25, "log_prob_chunk_tokens": 1},
        {"gradient_checkpointing": True},
    ],
)
def test_gradients_do_not_depend_on_options(qwen2: Path, options: dict) -> None:
    data = rig.batch()
    loss, want = rig.gradients(rig.backend(qwen2, max_grad_norm=None), data)
    got_loss, got = rig.gradients(rig.backend(qwen2, max_grad_norm=None, **options), data)
    assert got_loss == pytest.approx(loss, rel=1e-5)
    rig.assert_close(got, want)


def test_gradients_do_not_depend_on_padding_or_masked_content(qwen2: Path) -> None:
    made = rig.backend(qwen2, max_grad_norm=None)
    _, want = rig.gradients(made, rig.batch())
    _, wide = rig.gradients(made, rig.batch(prompt=12, response=15))
    rig.assert_close(wide, want)
    zeros = {name: rig.batch().batch[name].nan_to_num(0.0) for name in ("advantages", "old_log_probs", "ref_log_probs")}
    _, filled = rig.gradients(made, rig.batch().with_columns(**zeros))
    rig.assert_close(filled, want, 0)
    data = rig.batch()
    learnt = data.batch["response_mask"].any(dim=1)
    _, fewer = rig.gradients(made, data[learnt])
    rig.assert_close(fewer, want)


def test_temperature_in_gradients(qwen2: Path) -> None:
    data, term = rig.batch(), LossTerm(name="entropy")
    made = rig.backend(qwen2, max_grad_norm=None)
    loss, got = rig.gradients(made, data, [term], temperature=0.6)
    model, mask = rig.plain(qwen2), data.batch["response_mask"]
    _, entropy = rig.plain_outputs(model, data, 0.6)
    want = -(entropy * mask).sum() / mask.sum()
    want.backward()
    assert loss == pytest.approx(float(want.detach()), rel=1e-5)
    rig.assert_close(got, {name: p.grad for name, p in model.named_parameters()}, 2e-6)


def test_bfloat16_compute(qwen2: Path) -> None:
    _, want = rig.gradients(rig.backend(qwen2, max_grad_norm=None), rig.batch())
    made = rig.backend(qwen2, max_grad_norm=None, compute_dtype="bfloat16", gradient_checkpointing=True)
    _, got = rig.gradients(made, rig.batch())
    for name, gradient in want.items():
        assert got[name].dtype == torch.float32
        assert float(torch.cosine_similarity(got[name].flatten(), gradient.flatten(), dim=0)) > 0.99, name


def test_head_with_bias(tmp_path: Path) -> None:
    from transformers import PhiConfig, PhiForCausalLM

    PhiForCausalLM(PhiConfig(**rig.SMALL)).save_pretrained(tmp_path)
    data = rig.batch()
    _, want = rig.plain_gradients(tmp_path, data)
    assert "lm_head.bias" in want
    _, got = rig.gradients(rig.backend(tmp_path, max_grad_norm=None, log_prob_chunk_tokens=5), data)
    rig.assert_close(got, want, 2e-6)


def test_update_moves_weights_as_adamw_does(qwen2: Path) -> None:
    data = rig.batch()
    made = rig.backend(qwen2, max_grad_norm=0.5, optimizer={"weight_decay": 0.1, "eps": 1e-3})
    _, grads = rig.plain_gradients(qwen2, data)
    reference = dict(rig.plain(qwen2).named_parameters())
    groups = [{"params": [p for p in reference.values() if p.dim() > 1], "weight_decay": 0.1},
              {"params": [p for p in reference.values() if p.dim() == 1], "weight_decay": 0.0}]  # fmt: skip
    optimizer = torch.optim.AdamW(groups, lr=5e-3, eps=1e-3)
    for name, parameter in reference.items():
        parameter.grad = grads[name]
    norm = float(torch.nn.utils.clip_grad_norm_(reference.values(), 0.5))
    optimizer.step()
    metrics = made.update(data, rig.TERMS, rig.counts(data), temperature=1.0, lr_factor=0.5)
    assert metrics["grad_norm"].result() == pytest.approx(norm, rel=1e-5) and norm > 0.5
    assert metrics["lr"].result() == 5e-3
    assert {"loss", "clip_fraction", "kl", "entropy"} <= set(metrics)
    moved = dict(made.model.named_parameters())
    for name, parameter in reference.items():
        torch.testing.assert_close(moved[name], parameter, atol=1e-6, rtol=0)


@pytest.mark.parametrize("column", ["advantages", "old_log_probs"])
def test_a_loss_that_is_not_finite_changes_nothing(qwen2: Path, column: str) -> None:
    made, data = rig.backend(qwen2), rig.batch()
    before = {name: p.clone() for name, p in made.model.named_parameters()}
    row, place = data.batch["response_mask"].nonzero()[3].tolist()
    broken = data.batch[column].clone()
    broken[row, place] = torch.nan
    with pytest.raises(NonFiniteError, match="no weight was changed"):
        made.update(data.with_columns(**{column: broken}), rig.TERMS, rig.counts(data), temperature=1.0, lr_factor=1.0)
    for name, parameter in made.model.named_parameters():
        assert parameter.equal(before[name]) and parameter.grad is None
    assert not made.optimizer.state
    made.update(data, rig.TERMS, rig.counts(data), temperature=1.0, lr_factor=1.0)


def test_a_batch_without_anything_to_learn(qwen2: Path) -> None:
    made, data = rig.backend(qwen2), rig.batch(1)
    metrics = made.update(data, rig.TERMS, rig.counts(data), temperature=1.0, lr_factor=1.0)
    assert metrics["loss"].result() == 0 and metrics["grad_norm"].result() == 0


class Scoped:
    """A registry with one term of a scope, which keeps the uids it is shown."""

    def __init__(self, scope: str, needs: tuple[str, ...] = ("log_probs",)) -> None:
        self.spec = type("Spec", (), {"scope": scope, "needs": needs})()
        self.seen: list[list[int]] = []

    def select(self, hook: str, name: str) -> "Scoped":
        return self

    def term(self, outputs, batch, counts):
        from drivetrain.numerics import LossResult

        self.seen.append(batch["uid"].tolist())
        return LossResult(loss=outputs.log_probs.sum())


@pytest.fixture
def scoped(monkeypatch: pytest.MonkeyPatch):
    def use(*args) -> Scoped:
        registry = Scoped(*args)
        monkeypatch.setattr(objective, "get_registry", lambda: registry)
        monkeypatch.setattr(objective, "resolve", lambda hook, name: registry.term)
        return registry

    return use


def test_groups_and_pairs_stay_together(qwen2: Path, scoped) -> None:
    data, made = rig.batch(), rig.backend(qwen2, micro_batch_tokens=20)
    registry = scoped("group")
    made.update(data, [LossTerm(name="mine")], rig.counts(data), temperature=1.0, lr_factor=1.0)
    assert sorted(uid for part in registry.seen for uid in set(part)) == [0, 1, 2, 3]
    registry = scoped("token")
    paired = data.with_columns(loss_group=[row % 6 for row in range(12)], uid=[row % 6 for row in range(12)])
    made.update(paired, [LossTerm(name="mine")], rig.counts(data), temperature=1.0, lr_factor=1.0)
    assert len(registry.seen) > 1 and sorted(uid for part in registry.seen for uid in set(part)) == list(range(6))


def test_a_term_over_the_whole_mini_batch(qwen2: Path, scoped) -> None:
    data, term = rig.batch(), [LossTerm(name="mine")]
    scoped("batch")
    rig.backend(qwen2).update(data, term, rig.counts(data), temperature=1.0, lr_factor=1.0)
    with pytest.raises(UserError, match="micro_batch_tokens"):
        made = rig.backend(qwen2, micro_batch_tokens=20)
        made.update(data, term, rig.counts(data), temperature=1.0, lr_factor=1.0)
    scoped("token", ("values",))
    with pytest.raises(PluginError, match="values"):
        made.update(data, term, rig.counts(data), temperature=1.0, lr_factor=1.0)


def test_micro_batches_keep_to_the_budget() -> None:
    lengths = [5, 9, 3, 3, 30, 1, 0, 7]
    plan = micro_batches(lengths, [[row] for row in range(8)], 10)
    assert sorted(row for rows in plan for row in rows) == list(range(8))
    assert [4] in plan and all(sum(lengths[row] for row in rows) <= 10 for rows in plan if rows != [4])
    assert len(plan) == 4 and plan == micro_batches(lengths, [[row] for row in range(8)], 10)
    assert micro_batches([], [], 10) == []
