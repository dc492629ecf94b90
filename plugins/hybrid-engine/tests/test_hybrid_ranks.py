"""Two processes that train one sharded model, each with a rollout that has the whole of it."""

from __future__ import annotations

from pathlib import Path

import hybrid_ranks
import hybrid_rig as rig
import torch
import torch.multiprocessing as multiprocessing


def test_each_rank_generates_with_the_whole_model(models: dict[str, Path], tmp_path: Path) -> None:
    multiprocessing.spawn(hybrid_ranks.colocated, (models, tmp_path), nprocs=2)
    for name, model in models.items():
        check(model, tmp_path / name)


def check(model: Path, folder: Path) -> None:
    """Hold what two ranks did against one process."""
    ranks = [torch.load(folder / f"seen-{rank}.pt") for rank in range(2)]
    one = rig.Pair(model, sharing="never")
    norms = []
    for version in range(3):
        one.backend.load(folder / f"state-{version}")  # what two ranks trained, whole in one process
        one.hybrid.enter_generation(version)
        for rank in ranks:
            assert not rank["shares"]
            rig.assert_same(rank["held"][version], one.held())
            assert rank["mismatch"][version] < 1e-5
        for rank, mine in zip(ranks, (hybrid_ranks.PROMPTS[:3], hybrid_ranks.PROMPTS[3:])):
            assert rank["tokens"][version] == [completion.token_ids for completion in one.generate(mine)]
        norms.append(one.held()[rig.NORM])
    assert not norms[0].equal(norms[1]) and not norms[1].equal(norms[2])
    # one rank's stream was wrong: it said so, the other was not left waiting, and both had the next sync
    assert [rank["error"] for rank in ranks] == ["", "weight 'model.layers.0.input_layernorm.weight' was sent twice"]
    assert all(rank["mismatch"][3] < 1e-5 for rank in ranks)
