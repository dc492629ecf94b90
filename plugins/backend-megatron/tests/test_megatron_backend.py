"""Log-probabilities, updates, checkpoints and exports of the backend, whatever the parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import megatron_learning as learning
import megatron_rig as rig
import pytest
import torch
import torch.multiprocessing as multiprocessing

TP, PP, CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
EP, ETP = "expert_model_parallel_size", "expert_tensor_parallel_size"
VPP, SP, DO = "virtual_pipeline_model_parallel_size", "sequence_parallel", "use_distributed_optimizer"
FREES = "grad_offload"
BLOCK = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2}
REDUCE = {"overlap_grad_reduce": True, "ddp_bucket_size": 3000}
CASES: dict[int, list[tuple[str, dict[str, Any]]]] = {
    1: [("qwen2", {}), ("tied", {DO: True}), ("mixtral", {})],
    2: [
        ("qwen2", {TP: 2}),
        ("tied", {TP: 2, SP: True, **BLOCK}),
        ("qwen3", {**REDUCE}),
        ("tied", {DO: True, FREES: True, **REDUCE, "overlap_param_gather": True}),
        ("qwen2", {PP: 2}),
        ("tied", {PP: 2, VPP: 2, "recompute_granularity": "full"}),
        ("qwen2", {CP: 2, "recompute_granularity": "selective"}),
        ("mixtral", {EP: 2, DO: True, **REDUCE}),
    ],
    4: [
        ("tied", {TP: 2}),
        ("qwen3", {TP: 2, SP: True, DO: True}),
        ("tied", {TP: 2, PP: 2}),
        ("llama", {TP: 2, CP: 2, SP: True}),
        ("qwen2", {PP: 2, DO: True}),
        ("tied", {PP: 2, VPP: 2, DO: True}),
        ("qwen2", {CP: 2}),
        ("mixtral", {TP: 2, EP: 2, SP: True}),
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of each family, and what transformers makes of it."""
    folder = tmp_path_factory.mktemp("models")
    for name in rig.FAMILIES:
        rig.write_model(name, folder / name)
        rig.write_tokenizer(folder / name)
        torch.save(tuple(learning.expected(folder / name)), folder / f"{name}.pt")
    return folder


@pytest.mark.parametrize("processes", CASES)
def test_ranks_learn_as_transformers_does(models: Path, processes: int) -> None:
    multiprocessing.spawn(learning.work, (processes, models, CASES[processes]), nprocs=processes)
    ranks = [torch.load(models / f"seen-{processes}-{rank}.pt") for rank in range(processes)]
    wrong = []
    for number, case in enumerate(CASES[processes]):
        of_ranks = [learning.Seen(*rank[number]) for rank in ranks]
        assert _equal_micro_batches(case[1], of_ranks)
        for seen in of_ranks:
            close = seen.outputs < 6e-6 and seen.losses < 2e-6 and seen.norms < 5e-6 and seen.weights < 5e-6
            if not (close and seen.survived and seen.resumed and seen.refused and seen.exported):
                wrong.append((case, seen))
    assert not wrong


def _equal_micro_batches(sizes: dict[str, Any], ranks: list[learning.Seen]) -> bool:
    """Whether all ranks ran as many micro-batches as the busiest fills, several, and what interleaved stages need."""
    busiest = [max(counts) for counts in zip(*(seen.filled for seen in ranks))]
    multiple = sizes[PP] if VPP in sizes else 1
    assert min(busiest) >= 3 and busiest[0] % 2  # no multiple of two stages
    return all(seen.ran == [-(-count // multiple) * multiple for count in busiest] for seen in ranks)
