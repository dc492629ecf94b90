"""Values, their gradients and steps, and scores of texts are those of transformers, whatever the parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import megatron_judging as judging
import pytest
import torch
import torch.multiprocessing as multiprocessing

TP, PP, CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
EP, VPP, SP, DO = ("expert_model_parallel_size", "virtual_pipeline_model_parallel_size", "sequence_parallel",
                   "use_distributed_optimizer")  # fmt: skip
LAYERS = {"llama": 2, "qwen2": 2, "tied": 4, "qwen3": 2, "mixtral": 2}
PADS = {"llama": judging.PAD, "tied": judging.PAD}  # reward models that know of padding
CASES: dict[int, list[tuple[str, dict[str, Any]]]] = {
    2: [
        ("qwen2", {TP: 2}),
        ("qwen3", {TP: 2, SP: True, DO: True}),
        ("llama", {TP: 2, SP: True}),
        ("qwen2", {PP: 2}),
        ("tied", {PP: 2, VPP: 2}),
        ("qwen3", {CP: 2}),
        ("llama", {DO: True}),
        ("mixtral", {EP: 2}),
    ],
    4: [
        ("tied", {TP: 2, PP: 2}),
        ("llama", {TP: 2, CP: 2, SP: True}),
        ("mixtral", {PP: 2, EP: 2, DO: True}),
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a critic and a reward model of each family, and what transformers makes of the critic."""
    folder = tmp_path_factory.mktemp("models")
    for name, layers in LAYERS.items():
        judging.write(name, folder / f"{name}-critic", "Token", num_hidden_layers=layers)
        judging.write(name, folder / f"{name}-judge", "Sequence", num_hidden_layers=layers, pad_token_id=PADS.get(name))
        torch.save(tuple(judging.expected(folder / f"{name}-critic")), folder / f"{name}.pt")
    return folder


@pytest.mark.parametrize("processes", CASES)
def test_ranks_judge_as_transformers_does(models: Path, processes: int) -> None:
    multiprocessing.spawn(judging.work, (processes, models, CASES[processes]), nprocs=processes)
    ranks = [torch.load(models / f"seen-{processes}-{rank}.pt") for rank in range(processes)]
    wrong = []
    for number, case in enumerate(CASES[processes]):
        for seen in (judging.Seen(*rank[number]) for rank in ranks):
            close = seen.values < 6e-6 and (seen.gradients or 0.0) < 2e-6 and seen.losses < 4e-6
            close = close and seen.norms < 5e-6 and seen.weights < 5e-6 and seen.scores < 6e-6
            if not (close and seen.head and seen.resumed and seen.exported):
                wrong.append((case, seen))
    assert not wrong
