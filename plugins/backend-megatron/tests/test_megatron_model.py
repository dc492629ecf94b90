"""Logits, gradients and weights of megatron-core's models are those of transformers, whatever the parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import megatron_rig as rig
import pytest
import torch
import torch.multiprocessing as multiprocessing

TP, PP, CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
EP, ETP = "expert_model_parallel_size", "expert_tensor_parallel_size"
VPP, SP = "virtual_pipeline_model_parallel_size", "sequence_parallel"
CASES: dict[int, list[tuple[str, dict[str, Any]]]] = {
    1: [(name, {}) for name in rig.FAMILIES],
    2: [
        *((name, {TP: 2}) for name in ("llama", "qwen2", "tied", "qwen3")),
        ("qwen2", {PP: 2}),
        ("tied", {PP: 2}),
        ("mixtral", {PP: 2}),
        ("tied", {PP: 2, VPP: 2}),
        ("qwen3", {TP: 2, SP: True}),
        ("tied", {TP: 2, SP: True}),
        ("mixtral", {TP: 2, SP: True}),
        ("mixtral", {TP: 2, SP: True, ETP: 1}),
        ("qwen2", {CP: 2}),
        ("qwen3", {}),
        ("mixtral", {}),
        ("mixtral", {CP: 2}),
        ("mixtral", {EP: 2}),
    ],
    4: [
        ("tied", {TP: 2, PP: 2}),
        ("qwen3", {TP: 2, PP: 2, VPP: 2, SP: True}),
        ("llama", {TP: 2, CP: 2, SP: True}),
        ("tied", {TP: 2, PP: 2, SP: True}),
        ("tied", {TP: 2, PP: 2, VPP: 2}),
        ("qwen2", {TP: 2, CP: 2}),
        ("qwen2", {PP: 2, CP: 2}),
        ("mixtral", {TP: 2, PP: 2, SP: True}),
        ("mixtral", {TP: 2, EP: 2, SP: True, ETP: 1}),
        ("mixtral", {TP: 2, EP: 2, SP: True}),
        ("mixtral", {PP: 2, EP: 2}),
        ("mixtral", {CP: 2, EP: 2}),
        ("qwen2", {TP: 2}),
    ],
}  # fmt: skip


def named(case: tuple[str, dict[str, Any]]) -> str:
    return f"{case[0]} {case[1]}"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of each family, and what transformers makes of it."""
    folder = tmp_path_factory.mktemp("models")
    for name in rig.FAMILIES:
        rig.write_model(name, folder / name)
        for copies in (1, 2):
            torch.save(tuple(rig.reference(folder / name, copies)), folder / f"{name}-{copies}.pt")
    return folder


@pytest.mark.parametrize("processes", CASES)
def test_ranks_equal_transformers(models: Path, processes: int) -> None:
    multiprocessing.spawn(rig.work, (processes, models, CASES[processes]), nprocs=processes)
    ranks = [torch.load(models / f"seen-{processes}-{rank}.pt") for rank in range(processes)]
    wrong = []
    for number, case in enumerate(CASES[processes]):
        seen = [rig.Seen(*rank[number]) for rank in ranks]
        if (
            max(rank.logits for rank in seen) > 4e-6
            or max(rank.gradients for rank in seen) > 2e-6
            or not all(rank.weights for rank in seen)
            or not any(rank.micro_batches for rank in seen)
        ):
            wrong.append((named(case), seen))
    assert not wrong
