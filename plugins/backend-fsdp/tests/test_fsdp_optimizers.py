"""Optimizers against plain loops, on one rank and on two; and updates that are skipped."""

from pathlib import Path

import fsdp_optimizer_ranks as ranks
import fsdp_ranks
import fsdp_rig as rig
import pytest
import torch
import torch.multiprocessing as multiprocessing
from torch import nn

from drivetrain import LossTerm, NonFiniteError, UserError
from drivetrain_backend_fsdp.config import AdamWConfig, MuonConfig
from drivetrain_backend_fsdp.muon import muon, newton_schulz
from drivetrain_backend_fsdp.optimizer import adamw


def plain_adamw(name: str, lr: float, decay: float, betas: tuple[float, float], eps: float = 1e-8) -> torch.Tensor:
    """Three steps of AdamW, written out."""
    weight = ranks.drawn(name, 0).double()
    mean, square = torch.zeros_like(weight), torch.zeros_like(weight)
    for step in range(1, 4):
        gradient = ranks.drawn(name, step).double()
        mean = betas[0] * mean + (1 - betas[0]) * gradient
        square = betas[1] * square + (1 - betas[1]) * gradient**2
        weight = weight - lr * decay * weight
        unbiased = mean / (1 - betas[0] ** step), square / (1 - betas[1] ** step)
        weight = weight - lr * unbiased[0] / (unbiased[1].sqrt() + eps)
    return weight.float()


def plain_newton_schulz(x: torch.Tensor) -> torch.Tensor:
    """Five iterations on one matrix."""
    x = x / x.pow(2).sum().sqrt()
    for _ in range(5):
        outer = x @ x.T
        x = 3.4445 * x - 4.7750 * outer @ x + 2.0315 * outer @ outer @ x
    return x


def plain_muon(name: str, lr: float, decay: float, nesterov: bool, original: bool) -> torch.Tensor:
    """Three steps of Muon, written out, in float64, one matrix at a time."""
    weights = ranks.drawn(name, 0).double()
    matrices = list(weights) if weights.dim() == 3 else [weights]
    done = []
    for number, matrix in enumerate(matrices):
        mean = torch.zeros_like(matrix)
        for step in range(1, 4):
            gradient = ranks.drawn(name, step).double()
            gradient = gradient[number] if gradient.dim() == 3 else gradient
            mean = 0.95 * mean + 0.05 * gradient
            x = plain_newton_schulz(0.95 * mean + 0.05 * gradient if nesterov else mean)
            rows, columns = matrix.shape
            factor = max(1, rows / columns) ** 0.5 if original else 0.2 * max(rows, columns) ** 0.5
            matrix = matrix * (1 - lr * decay) - lr * factor * x
        done.append(matrix)
    return (torch.stack(done) if weights.dim() == 3 else done[0]).float()


@pytest.mark.parametrize("section", ["adamw", "adamw_plain"])
def test_adamw_is_its_formula(section: str) -> None:
    for name, weight in ranks.train(section).items():
        want = plain_adamw(name, 0.03, 0.0 if name == "bias" else 0.1, (0.8, 0.9))
        torch.testing.assert_close(weight, want, atol=1e-6, rtol=0)


@pytest.mark.parametrize("section", ["muon", "muon_original"])
def test_muon_is_its_formula(section: str) -> None:
    trained, first = ranks.train(section), section == "muon"
    for name in ("embed", "bias"):
        want = plain_adamw(name, 0.01 if first else 0.03, 0.1 if first and name == "embed" else 0.0,
                           (0.8, 0.9) if first else (0.9, 0.999))  # fmt: skip
        torch.testing.assert_close(trained[name], want, atol=1e-6, rtol=0)
    for name in ("wide", "tall", "experts", "one_row"):
        want = plain_muon(name, 0.03, 0.1 if first else 0.0, nesterov=first, original=not first)
        moved = (want - ranks.drawn(name, 0)).norm()
        assert float((trained[name] - want).norm() / moved) < 0.1, name  # the iteration is in bfloat16


def test_muon_agrees_with_that_of_torch() -> None:
    weight, options = nn.Parameter(ranks.drawn("wide", 0)), {"lr": 0.03, "weight_decay": 0.1}
    theirs = torch.optim.Muon([weight], adjust_lr_fn="match_rms_adamw", **options)
    for step in range(1, 4):
        weight.grad = ranks.drawn("wide", step)
        theirs.step()
    ours = ranks.train("muon")["wide"]
    assert float((ours - weight.detach()).norm() / (weight.detach() - ranks.drawn("wide", 0)).norm()) < 0.03


@pytest.mark.parametrize("shape", [(16, 48), (48, 16), (3, 20, 20)])
def test_newton_schulz_flattens_singular_values(shape: tuple[int, ...]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    result = newton_schulz(matrices, 5)
    each = zip(result.reshape(-1, *shape[-2:]), matrices.reshape(-1, *shape[-2:]), strict=True)
    for got, matrix in each:
        torch.testing.assert_close(got.double(), plain_newton_schulz(matrix.double()), atol=1e-4, rtol=0)
    values = torch.linalg.svdvals(result)
    assert 0.4 < float(values.min()) and float(values.max()) < 1.3
    u, _, v = torch.linalg.svd(matrices, full_matrices=False)
    cosine = torch.cosine_similarity(result.flatten(), (u @ v).flatten(), dim=0)
    assert float(cosine) > 0.95


def test_options_of_optimizers_are_checked() -> None:
    weights = [("embed.weight", nn.Parameter(torch.ones(3, 4))), ("bias", nn.Parameter(torch.ones(3)))]
    with pytest.raises(UserError, match="no hidden matrix that muon could train.*adamw_names"):
        muon(weights, MuonConfig(lr=0.1))
    assert adamw(weights, AdamWConfig(lr=0.1)).defaults["fused"] is True
    assert adamw(weights, AdamWConfig(lr=0.1, fused=False)).defaults["fused"] is None
    nowhere = [("weight", nn.Parameter(torch.ones(3, 4, dtype=torch.complex64)))]  # as a device without a kernel
    with pytest.raises(UserError, match="no fused AdamW here.*optimizer.fused"):
        adamw(nowhere, AdamWConfig(lr=0.1, fused=True))
    assert adamw(nowhere, AdamWConfig(lr=0.1)).defaults["fused"] is None


def test_muon_chooses_hidden_matrices(any_model: Path) -> None:
    made = ranks.muon_backend(any_model)
    chosen = {id(parameter) for parameter in made.optimizer.param_groups[0]["params"]}
    for name, parameter in made.model.named_parameters():
        hidden = name.endswith("weight") or "experts" in name
        hidden = hidden and not any(part in name for part in ("norm", "embed", "lm_head"))
        assert (id(parameter) in chosen) == hidden, name
    everything = [parameter for group in made.optimizer.param_groups for parameter in group["params"]]
    assert len(everything) == len(set(map(id, everything))) == len(list(made.model.parameters()))


def test_muon_learns_and_resumes(qwen2: Path, tmp_path: Path) -> None:
    data = rig.critic_batch()
    terms = [LossTerm(name="value_clip", args={"clip_range": 100.0})]

    def step(made) -> float:
        return made.update(data, terms, rig.counts(data), temperature=1.0, lr_factor=1.0)["loss"].result()

    made = rig.critic(qwen2, section=MuonConfig(lr=2e-2))
    losses = [step(made) for _ in range(30)]
    assert losses[-1] < 0.1 * losses[0]
    made.save(tmp_path)
    following = [step(made), step(made)]
    fresh = rig.critic(qwen2, section=MuonConfig(lr=2e-2))
    step(fresh)
    fresh.load(tmp_path)
    assert [step(fresh), step(fresh)] == following


def test_two_ranks_equal_one(qwen2: Path, tmp_path: Path) -> None:
    one = ranks.muon_backend(qwen2)
    updates = [fsdp_ranks.update(one, slice(None)), fsdp_ranks.update(one, slice(None), 0.5)]
    (tmp_path / "one").mkdir()
    one.save(tmp_path / "one")
    following = fsdp_ranks.update(one, slice(None))

    multiprocessing.spawn(ranks.work, (qwen2, tmp_path, tmp_path / "one"), nprocs=2)
    for seen in (torch.load(tmp_path / f"seen-{rank}.pt") for rank in range(2)):
        for section in ranks.SECTIONS:
            for name, want in ranks.train(section).items():
                assert seen["trained"][section][name].equal(want), (section, name)
                assert seen["mixed"][section][name].equal(want), (section, name)
        norm, left = ranks.clipped()
        for got_norm, got in seen["clipped"]:
            assert got_norm == pytest.approx(norm, rel=1e-6) and norm > 0.7
            for name, want in left.items():
                torch.testing.assert_close(got[name], want, atol=1e-7, rtol=1e-6)
        for got, want in zip([*seen["updates"], seen["next"]], [*updates, following], strict=True):
            assert got == pytest.approx(want, rel=1e-2)
        assert seen["again"] == seen["next"]
        assert seen["from_one"] == pytest.approx(following, rel=1e-2)
        assert seen["unchanged"] and "after 2 skipped updates" in seen["refused"]
        for skipped in seen["skipped"]:
            assert skipped.keys() == {"loss", "grad_norm", "lr", "skipped_steps"}
            assert skipped["loss"] == skipped["grad_norm"] == 0 and skipped["lr"] == 1e-3
        assert {"clip_fraction", "kl"} <= seen["taken"].keys() and seen["taken"]["skipped_steps"] == 0
    counted = [torch.load(tmp_path / f"seen-{rank}.pt")["skipped"][0]["skipped_steps"] for rank in range(2)]
    assert counted == [1, 0]  # ranks add up

    resumed = ranks.muon_backend(qwen2, model={"init": "random"})
    resumed.load(tmp_path / "state")  # written by two processes
    assert fsdp_ranks.update(resumed, slice(None)) == pytest.approx(following, rel=1e-2)


def test_skipped_updates_leave_no_trace(qwen2: Path) -> None:
    data = rig.batch()
    broken = data.with_columns(advantages=torch.full_like(data.batch["advantages"], torch.nan))
    clean, made = rig.backend(qwen2), rig.backend(qwen2, max_skipped_steps=1)
    for _ in range(2):
        clean.update(data, rig.TERMS, rig.counts(data), temperature=1.0, lr_factor=0.5)
        made.update(broken, rig.TERMS, rig.counts(data), temperature=1.0, lr_factor=1.0)
        made.update(data, rig.TERMS, rig.counts(data), temperature=1.0, lr_factor=0.5)
    for (name, want), parameter in zip(clean.model.named_parameters(), made.model.parameters(), strict=True):
        assert parameter.equal(want), name
    assert made.version == clean.version == 2
    made.update(broken, rig.TERMS, rig.counts(data), temperature=1.0, lr_factor=1.0)
    with pytest.raises(NonFiniteError, match="after 1 skipped updates"):
        made.update(broken, rig.TERMS, rig.counts(data), temperature=1.0, lr_factor=1.0)
