"""Two processes: one engine over both, or an engine in each, draw what one engine of one process draws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as multiprocessing
import vllm_ranks
from rig_vllm import ATOL, FAMILIES, Served


@pytest.fixture(scope="module")
def ranks(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of them drew."""
    folder = tmp_path_factory.mktemp("ranks")
    multiprocessing.spawn(vllm_ranks.work, (models, folder), nprocs=2)
    return [torch.load(folder / f"seen-{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.fixture
def whole(served: Served) -> list[Any]:
    """What the engine of one process draws, with the folder's weights and after an update."""
    drawn = []
    for version, seed in enumerate((0, 2)):
        served.load(seed, version)
        drawn.append(served.engine.generate_batch(vllm_ranks.requests()))
    return drawn


def assert_drew(got: Any, expected: Any) -> None:
    for ours, theirs in zip(got, expected, strict=True):
        for (tokens, log_probs, reason), completion in zip(ours, theirs, strict=True):
            assert (tokens, reason) == (completion.token_ids, completion.finish_reason)
            assert log_probs == pytest.approx(completion.log_probs, abs=ATOL)


@pytest.mark.parametrize("served", FAMILIES, indirect=True)
def test_one_engine_over_two_processes(ranks: list[dict[str, Any]], whole: list[Any], served: Served) -> None:
    seen = [rank[f"{served.folder.name}2"] for rank in ranks]
    assert [one["place"] for one in seen] == [(0, 1, 0, 2), (0, 1, 1, 2)]
    assert [one["heads"] for one in seen] == [1, 1], "each has half of a layer"
    for one in seen:
        for got, expected in zip(one["drawn"], whole, strict=True):
            assert_drew(got, expected)
    assert seen[0]["drawn"][0] != seen[0]["drawn"][1]


@pytest.mark.parametrize("served", ["llama"], indirect=True)
def test_an_engine_in_each_process(ranks: list[dict[str, Any]], whole: list[Any], served: Served) -> None:
    seen = [rank[f"{served.folder.name}1"] for rank in ranks]
    assert [one["place"] for one in seen] == [(0, 2, 0, 1), (1, 2, 0, 1)]
    assert [one["heads"] for one in seen] == [2, 2]
    for rank, one in enumerate(seen):
        for got, expected in zip(one["drawn"], whole, strict=True):
            assert_drew(got, expected[3 * rank : 3 * rank + 3])


@pytest.mark.parametrize("name", vllm_ranks.COUPLED)
def test_trainers_over_two_processes(name: str, ranks: list[dict[str, Any]]) -> None:
    """Shards of FSDP go to halves of an engine, halves of Megatron's to whole ones; log-probs agree after updates."""
    seen = [rank[name] for rank in ranks]
    assert all(len(one["mismatch"]) == 3 and max(one["mismatch"]) < ATOL for one in seen)
    drawn = [one["responses"] for one in seen]
    assert all(a.equal(b) for a, b in zip(*drawn, strict=True))
    assert not drawn[0][0].equal(drawn[0][2])
