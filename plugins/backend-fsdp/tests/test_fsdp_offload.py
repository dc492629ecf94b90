"""Parts of a model go to the host and come back as they were, and an update does not tell the difference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsdp_offload
import fsdp_rig as rig
import pytest
import torch

from drivetrain import PluginError, RunError, UserError
from drivetrain_backend_common import host_memory
from drivetrain_backend_fsdp import offload
from drivetrain_backend_fsdp.backend import FSDPBackend

EVERYTHING = ("parameters", "optimizer")


def update(made: FSDPBackend, **data: Any) -> dict[str, float]:
    batch = rig.batch(**data)
    metrics = made.update(batch, rig.TERMS, rig.counts(batch), temperature=0.8, lr_factor=1.0)
    return {name: metrics[name].result() for name in ("loss", "grad_norm", "lr")}


@pytest.mark.parametrize("model", [{}, {"dtype": "bfloat16"}])
def test_parts_come_back_bit_for_bit(qwen2: Path, model: dict[str, str]) -> None:
    made = rig.backend(qwen2, model=model)
    update(made)
    parameters, before = list(made.model.parameters()), fsdp_offload.snapshot(made)
    bytes_held = made.memory()
    counters = 4 * len(parameters)  # of steps, one a parameter: they stay
    assert bytes_held["optimizer"] == 2 * bytes_held["parameters"] + counters > counters
    for _ in range(2):
        made.offload(EVERYTHING)
        assert [tensor.untyped_storage().nbytes() for tensor in fsdp_offload.tensors(made)] == [0] * len(before)
        assert made.memory() == {"parameters": 0, "gradients": 0, "optimizer": counters}
        made.offload(EVERYTHING)  # nothing is lost by asking twice
        made.onload(EVERYTHING)
        made.onload(EVERYTHING)
        assert fsdp_offload.same(fsdp_offload.snapshot(made), before)
        views = [tensor.view(-1) for tensor in fsdp_offload.tensors(made)]
    made.offload(EVERYTHING)
    made.onload(EVERYTHING)
    assert fsdp_offload.same(views, [tensor.view(-1) for tensor in before])  # what had been taken before
    assert all(now is then for now, then in zip(made.model.parameters(), parameters, strict=True))
    assert made.memory() == bytes_held


def test_one_part_goes_without_the_other(qwen2: Path) -> None:
    made = rig.backend(qwen2)
    update(made)
    held = made.memory()
    made.offload(["optimizer"])
    assert made.memory() == held | {"optimizer": held["optimizer"] - 2 * held["parameters"]}
    made.offload(["parameters"])
    made.onload(["optimizer"])
    assert made.memory() == held | {"parameters": 0}
    with pytest.raises(PluginError, match="no part weights to move; there are parameters, gradients, optimizer"):
        made.offload(["weights"])
    assert made.memory() == held | {"parameters": 0}


def test_gradients_are_a_part_while_there_are_some(qwen2: Path) -> None:
    made = rig.backend(qwen2)
    made.model(input_ids=torch.arange(3, 9)[None], use_cache=False).logits.square().mean().backward()
    before = [parameter.grad.clone() for parameter in made.model.parameters()]
    made.offload(["gradients"])
    assert made.memory()["gradients"] == 0
    with pytest.raises(RunError, match="role 'actor' has its gradients"):
        update(made)
    made.onload(["gradients"])
    assert all(p.grad.equal(grad) for p, grad in zip(made.model.parameters(), before, strict=True))


def test_updates_after_round_trips_are_those_without(qwen2: Path, tmp_path: Path) -> None:
    stays, moves = rig.backend(qwen2), rig.backend(qwen2, param_offload=True, optimizer_offload=True)
    assert (stays.offloads, moves.offloads) == (frozenset(), frozenset(EVERYTHING))
    for seed in range(3):
        moves.offload(EVERYTHING)
        moves.onload(EVERYTHING)
        assert update(moves, seed=seed) == update(stays, seed=seed)
    for name in ("stays", "moves"):
        (tmp_path / name).mkdir()
    stays.save(tmp_path / "stays")
    moves.save(tmp_path / "moves")
    assert fsdp_offload.same(fsdp_offload.snapshot(moves), fsdp_offload.snapshot(stays))
    moves.offload(EVERYTHING)
    moves.onload(EVERYTHING)
    moves.load(tmp_path / "stays")  # brings moments in other tensors, for which the shelf has room
    moves.offload(EVERYTHING)
    moves.onload(EVERYTHING)
    assert update(moves, seed=3) == update(stays, seed=3)


@pytest.mark.parametrize("role", ["ref", "critic"])
def test_models_of_other_roles_move_too(qwen2: Path, role: str) -> None:
    made = rig.critic(qwen2) if role == "critic" else rig.backend(qwen2, role="ref", learns=False)
    outputs = made.outputs[:1]
    before = made.forward(rig.batch(), outputs, temperature=1.0)[outputs[0]]
    made.offload(EVERYTHING)
    assert made.memory() == {"parameters": 0, "gradients": 0, "optimizer": 0}
    made.onload(EVERYTHING)
    assert made.forward(rig.batch(), outputs, temperature=1.0)[outputs[0]].equal(before)


def test_what_is_away_cannot_be_used(qwen2: Path, tmp_path: Path) -> None:
    made = rig.backend(qwen2)
    update(made)
    made.offload(["parameters"])
    for use in (
        lambda: made.forward(rig.batch(), ["log_probs"], temperature=1.0), lambda: update(made),
        lambda: made.weights(bucket_bytes=1000), lambda: made.export(tmp_path / "export"),
        lambda: made.save(tmp_path), lambda: made.load(tmp_path), made.live_module,
    ):  # fmt: skip
        with pytest.raises(RunError, match="role 'actor' has its parameters in host memory"):
            use()
    assert not any(tmp_path.iterdir())
    made.onload(["parameters"])
    made.offload(["optimizer"])
    made.forward(rig.batch(), ["log_probs"], temperature=1.0)
    made.weights(bucket_bytes=1000)
    for use in (lambda: update(made), lambda: made.save(tmp_path), lambda: made.load(tmp_path)):
        with pytest.raises(RunError, match="role 'actor' has its optimizer in host memory"):
            use()


def test_the_module_is_not_lent_where_its_parameters_will_leave(qwen2: Path) -> None:
    with pytest.raises(UserError, match="sharing: never"):
        rig.backend(qwen2, param_offload=True).live_module()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_offload_within_an_update_changes_no_bit(qwen2: Path, dtype: str, checkpointing: bool) -> None:
    options = {"micro_batch_tokens": 16, "model": {"dtype": dtype}, "gradient_checkpointing": checkpointing}
    plain = rig.backend(qwen2, **options)
    made = rig.backend(qwen2, grad_offload=True, activation_offload=True, **options)
    seen: list[int] = []
    inner = made._host_gradients.put
    made._host_gradients.put = lambda parameters: (inner(parameters), seen.append(made.memory()["gradients"]))
    for seed in range(2):
        assert update(made, seed=seed) == update(plain, seed=seed)
    assert len(seen) > 4 and set(seen) == {0}
    assert fsdp_offload.same(fsdp_offload.snapshot(made), fsdp_offload.snapshot(plain))


def test_sums_on_the_host_forget_an_update_that_was_broken_off(qwen2: Path) -> None:
    plain, made = (rig.backend(qwen2, micro_batch_tokens=30, grad_offload=moves) for moves in (False, True))
    with pytest.MonkeyPatch.context() as patch:
        calls: list[int] = []
        inner = made._evaluate

        def breaks(*args: Any) -> Any:
            calls.append(1)
            if len(calls) == 3:
                raise RuntimeError("out of memory")
            return inner(*args)

        patch.setattr(made, "_evaluate", breaks)
        with pytest.raises(RuntimeError, match="out of memory"):
            update(made)
    assert update(made) == update(plain)


def test_a_parameter_without_a_gradient_in_the_last_micro_batch_keeps_its_sum() -> None:
    hardware = rig.resolve("hardware", "cpu")(rig.PluginConfig(name="cpu"))
    parameters = [torch.nn.Parameter(torch.zeros(3, 2)), torch.nn.Parameter(torch.zeros(5, dtype=torch.bfloat16)),
                  torch.nn.Parameter(torch.zeros(4))]  # fmt: skip
    sums, random = offload.HostGradients(hardware), torch.Generator().manual_seed(0)
    expected: list[Any] = [None, None, None]
    for present in ((0,), (0, 1), (0, 1)):
        for number in present:
            drawn = torch.randn(parameters[number].shape, generator=random).to(parameters[number].dtype)
            drawn = drawn.t().contiguous().t() if drawn.dim() == 2 else drawn  # laid out by columns
            parameters[number].grad = drawn.clone()
            expected[number] = drawn if expected[number] is None else expected[number] + drawn
        sums.put(parameters)
        assert all(parameter.grad is None for parameter in parameters)
    last = torch.randn(3, 2, generator=random)
    parameters[0].grad = last.clone()
    sums.take(parameters)
    assert parameters[0].grad.equal(expected[0] + last)
    assert parameters[1].grad.equal(expected[1])
    assert parameters[2].grad is None


@pytest.mark.parametrize("checkpointing", [True, False])
def test_what_layers_save_is_on_the_host(qwen2: Path, checkpointing: bool) -> None:
    """With recomputation a layer saves its input and little else; parameters are never copied."""
    made = rig.backend(qwen2, activation_offload=True, gradient_checkpointing=checkpointing)
    copied: list[torch.Size] = []
    empty = torch.empty

    def counted(*size: Any, **options: Any) -> torch.Tensor:
        if "pin_memory" in options:
            copied.append(torch.Size(*size))
        return empty(*size, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload.torch, "empty", counted)
        update(made, rows=2)
    weights = {parameter.shape for parameter in made.model.parameters() if parameter.dim() == 2}
    assert not weights & set(copied)
    hidden = [shape for shape in copied if shape[-1] == rig.SMALL["hidden_size"] and len(shape) == 3]
    layers = rig.SMALL["num_hidden_layers"]
    assert len(hidden) == layers if checkpointing else len(hidden) > 4 * layers


def test_tensors_larger_than_a_bucket_are_cut(qwen2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "BUCKET_BYTES", 1024)
    monkeypatch.setattr(host_memory, "SMALLEST_BYTES", 64)
    plain = rig.backend(qwen2, micro_batch_tokens=30)
    made = rig.backend(qwen2, micro_batch_tokens=30, grad_offload=True)
    for seed in range(2):
        assert update(made, seed=seed) == update(plain, seed=seed)
        made.offload(EVERYTHING)
        made.onload(EVERYTHING)
    assert max(p.nbytes for p in made.model.parameters()) > 4 * 1024
    assert fsdp_offload.same(fsdp_offload.snapshot(made), fsdp_offload.snapshot(plain))


def test_cpu_offload_wants_several_processes(qwen2: Path) -> None:
    with pytest.raises(UserError, match="one process shards nothing"):
        rig.backend(qwen2, cpu_offload=True)
