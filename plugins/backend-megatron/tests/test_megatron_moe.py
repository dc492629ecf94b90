"""The balance of experts: its losses and metrics are those of the plain formulas, whatever the parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import megatron_learning as learning
import megatron_rig as rig
import pytest
import torch
import torch.multiprocessing as multiprocessing

from drivetrain.numerics import Counts
from drivetrain.protocol import units
from drivetrain_backend_common.rows import micro_batches
from drivetrain_backend_megatron import parallel

pytestmark = pytest.mark.usefixtures("groups_go")

TP, CP, PP = "tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size"
EP, SP = "expert_model_parallel_size", "sequence_parallel"
AUX, Z = 0.5, 0.05
BALANCED = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": AUX, "moe_z_loss_coeff": Z}
CASES: dict[int, list[tuple[str, dict[str, Any]]]] = {
    1: [
        ("whole", {**BALANCED, "micro_batch_tokens": 1000}),
        ("many", {**BALANCED, "recompute_granularity": "selective", "recompute_modules": ("moe",)}),
    ],
    2: [
        ("whole", {**BALANCED, "micro_batch_tokens": 1000, CP: 2}),
        ("whole", {**BALANCED, "micro_batch_tokens": 1000, TP: 2, SP: True, "recompute_granularity": "full"}),
        ("halves", {**BALANCED, "micro_batch_tokens": 1000}),
        ("halves", {**BALANCED, "micro_batch_tokens": 1000, EP: 2}),
        ("many", {**BALANCED, PP: 2}),
    ],
}


def parts(name: str, step: int) -> Sequence[Sequence[int]]:
    """The rows of each micro-batch: all, those of two ranks, or as many as the budget of tokens allows."""
    pairs = step == learning.STEPS - 1
    if name == "whole":
        return [range(learning.ROWS)]
    if name == "halves":
        first = 8 if pairs else 9
        return [range(first), range(first, learning.ROWS)]
    lengths = learning.read(learning.batch()).lengths
    rows = units(learning.ROWS, [learning.PAIRS.tolist()] if pairs else [])
    found = micro_batches(lengths, rows, learning.BUDGET)
    assert len(found) > 3
    return found


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One mixture under the names of its micro-batches."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("whole", "halves", "many"):
        rig.write_model("mixtral", folder / name, num_hidden_layers=2)
        rig.write_tokenizer(folder / name)
        wanted = learning.expected(folder / name, aux=AUX, z=Z, parts=partial(parts, name))
        torch.save(tuple(wanted), folder / f"{name}.pt")
    return folder


@pytest.mark.parametrize("processes", CASES)
def test_ranks_learn_as_the_formulas_say(models: Path, processes: int) -> None:
    multiprocessing.spawn(learning.work, (processes, models, CASES[processes]), nprocs=processes)
    ranks = [torch.load(models / f"seen-{processes}-{rank}.pt") for rank in range(processes)]
    wrong = []
    for number, case in enumerate(CASES[processes]):
        for seen in (learning.Seen(*rank[number]) for rank in ranks):
            if max(seen.losses, seen.norms, seen.weights) > 5e-6 or not (seen.resumed and seen.refused):
                wrong.append((case, seen))
    assert not wrong


def test_what_the_losses_change_is_seen(models: Path) -> None:
    plain, balanced = learning.expected(models / "whole"), torch.load(models / "whole.pt", weights_only=False)
    router = "model.layers.0.block_sparse_moe.gate.weight"
    assert float((plain.weights[router] - learning.Expected(*balanced).weights[router]).abs().max()) > 1e-3


def test_metrics_tell_the_balance(models: Path) -> None:
    """With routers that know no difference, experts are alike but for the order of ties."""
    made = learning.backend(models / "whole", **BALANCED)
    data = learning.batch()
    counts = Counts.of(data.batch["response_mask"], None)
    found = made.update(data, learning.TERMS, counts, temperature=1.0, lr_factor=1.0)
    values = {name: found[name].result() for name in ("busiest_expert", "balance_loss", "router_z_loss")}
    assert 0.25 < values["busiest_expert"] <= 0.5 and values["balance_loss"] > 0.9 and values["router_z_loss"] > 0
    with torch.no_grad():
        for piece in made.pieces:
            for layer in piece.decoder.layers:
                layer.mlp.router.weight.zero_()
    even = made.update(data, learning.TERMS, counts, temperature=1.0, lr_factor=1.0)
    assert even["balance_loss"].result() == pytest.approx(1.0)
    assert even["router_z_loss"].result() == pytest.approx(float(torch.tensor(4.0).log()) ** 2)
    assert even["busiest_expert"].result() == pytest.approx(0.5)
    parallel.release()
    silent = learning.backend(models / "whole").update(data, learning.TERMS, counts, temperature=1.0, lr_factor=1.0)
    assert "busiest_expert" in silent and not {"balance_loss", "router_z_loss"} & silent.keys()
