"""AdamW with 8-bit moments: against a plain loop and torchao, on one rank and on two, in the backend ``fsdp``."""

import subprocess
import sys
from pathlib import Path

import optimizer_rig as rig
import pytest
import torch
import torch.multiprocessing as multiprocessing
from pydantic import ValidationError
from torch import nn
from torchao.optim.adam import single_param_adam
from torchao.optim.quant_utils import create_dynamic_map
from torchao.optim.subclass_8bit import OptimState8bit

from drivetrain import UserError
from drivetrain_optimizers.adamw_8bit import adamw_8bit
from drivetrain_optimizers.configs import AdamW8bitConfig


def rounded(moment: torch.Tensor, signed: bool) -> torch.Tensor:
    """Each block of 64, divided by its largest magnitude, at the nearest number of the table."""
    table = torch.tensor(create_dynamic_map(signed=signed))
    blocks = moment.reshape(-1, 64)
    largest = blocks.abs().amax(1, keepdim=True)
    return (table[((blocks / largest)[:, :, None] - table).abs().argmin(2)] * largest).view(moment.shape)


@pytest.fixture(scope="module")
def seen() -> dict[str, torch.Tensor]:
    return rig.outcome()


@pytest.mark.parametrize("name", rig.SHAPES)
def test_it_is_its_formula(seen: dict[str, torch.Tensor], name: str) -> None:
    weight = rig.drawn(name, 0)
    mean, square = torch.zeros_like(weight), torch.zeros_like(weight)
    for step in range(1, 4):
        gradient = rig.drawn(name, step)
        mean, square = 0.8 * mean + 0.2 * gradient, 0.9 * square + 0.1 * gradient**2
        weight = weight * (1 - 0.02 * (0.0 if name == "norm" else 0.1))
        weight = weight - 0.02 * (mean / (1 - 0.8**step)) / ((square / (1 - 0.9**step)).sqrt() + 1e-8)
        if name in rig.QUANTISED:
            mean, square = rounded(mean, True), rounded(square, False)
    # a moment on the border of two numbers may go to either, which moves a few weights
    apart = (seen[name] - weight).abs() > 2e-6
    assert float(apart.float().mean()) < (1e-3 if name in rig.QUANTISED else 1e-9)
    assert (seen[f"{name}.exp_avg"].dtype == torch.uint8) == (name in rig.QUANTISED)


def test_quantised_moments_lead_where_full_ones_do(seen: dict[str, torch.Tensor]) -> None:
    for name in rig.SHAPES:
        weight = nn.Parameter(rig.drawn(name, 0))
        full = torch.optim.AdamW([weight], lr=0.02, betas=(0.8, 0.9), weight_decay=0.0 if name == "norm" else 0.1)
        for step in range(1, 4):
            weight.grad = rig.drawn(name, step)
            full.step()
        moved = (weight.detach() - rig.drawn(name, 0)).norm()
        assert float((seen[name] - weight.detach()).norm() / moved) < (0.25 if name in rig.QUANTISED else 1e-5), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_is_that_of_torchao(dtype: torch.dtype) -> None:
    seen = rig.outcome(dtype=dtype)
    weight, step = rig.drawn("even", 0, dtype), torch.tensor(0.0)
    mean, square = (OptimState8bit.zeros(weight.shape, signed, 64, dtype=dtype) for signed in (True, False))
    for number in range(1, 4):
        step += 1
        gradient = rig.drawn("even", number, dtype)
        single_param_adam(
            weight, gradient, step, mean, square, None, torch.tensor(0.02), 0.8, 0.9, 0.1, 1e-8, True, False
        )
    ulp = 2e-6 if dtype == torch.float32 else 2e-2
    assert float(((seen["even"].float() - weight.float()).abs() > ulp).float().mean()) < 1e-3
    same = [(seen["even.exp_avg"] == mean.codes), (seen["even.exp_avg_sq"] == square.codes)]
    assert all(float(codes.float().mean()) > 0.999 for codes in same)
    torch.testing.assert_close(seen["even.exp_avg_scale"].flatten(), mean.scale, atol=0, rtol=1e-5)


def test_memory() -> None:
    parameters, optimizer = rig.train()
    for name, parameter in parameters.items():
        held = sum(value.numel() * value.element_size() for value in optimizer.state[parameter].values()) - 4
        bytes_a_weight = held / parameter.numel()
        assert bytes_a_weight == (2 * (1 + 4 / 64) if name in rig.QUANTISED else 8), name


def test_options_are_checked() -> None:
    with pytest.raises(UserError, match="no matrix has rows of a multiple of 128.*optimizer.block_size"):
        adamw_8bit([("a", nn.Parameter(torch.ones(100, 64)))], AdamW8bitConfig(lr=0.1))
    for options in ({}, {"lr": 0.1, "betas": (1.0, 0.9)}, {"lr": 0.1, "block_size": 8}, {"lr": 0.1, "fused": True}):
        with pytest.raises(ValidationError):
            AdamW8bitConfig(**options)


def test_offer_is_cheap() -> None:
    code = (
        "import sys; from drivetrain_optimizers import plugin, configs;"
        " assert [spec.name for spec in plugin.drivetrain_optimizers()] == ['adamw_8bit'];"
        " assert not {'torch', 'torchao'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_learning_and_checkpoints_on_one_rank_and_two(seen: dict[str, torch.Tensor], tmp_path: Path) -> None:
    model = rig.write_model(tmp_path / "model")
    one = rig.backend(model)
    updates = [rig.step(one), rig.step(one)]
    (tmp_path / "one").mkdir()
    one.save(tmp_path / "one")
    following = [rig.step(one), rig.step(one)]
    fresh = rig.backend(model)
    rig.step(fresh)
    fresh.load(tmp_path / "one")
    assert [rig.step(fresh), rig.step(fresh)] == following
    last = [rig.step(one) for _ in range(25)][-1]
    assert last["loss"] < 0.1 * updates[0]["loss"]

    multiprocessing.spawn(rig.work, (model, tmp_path, tmp_path / "one"), nprocs=2)
    for rank in (torch.load(tmp_path / f"seen-{rank}.pt") for rank in range(2)):
        assert rank["trained"].keys() == seen.keys()
        for name, tensor in seen.items():
            assert rank["trained"][name].equal(tensor), name
        assert rank["again"] == rank["next"]
        for got, want in zip([*rank["updates"], *rank["next"]], [*updates, *following], strict=True):
            assert got == pytest.approx(want, rel=1e-3)
        for got, want in zip(rank["from_one"], following, strict=True):
            assert got == pytest.approx(want, rel=1e-3)
    resumed = rig.backend(model)
    resumed.load(tmp_path / "state")  # written by two processes
    for want in following:
        assert rig.step(resumed) == pytest.approx(want, rel=1e-3)
