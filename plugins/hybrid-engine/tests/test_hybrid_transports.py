"""Buckets between processes."""

from __future__ import annotations

from pathlib import Path

import hybrid_ranks
import hybrid_rig as rig
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from drivetrain import Meeting, PluginConfig, RunError, resolve
from drivetrain.weights import lend


def test_buckets_from_a_trainer_to_a_rollout_in_another_process(models: dict[str, Path], tmp_path: Path) -> None:
    multiprocessing.spawn(hybrid_ranks.between_processes, (models["tied"], tmp_path), nprocs=2)
    seen = torch.load(tmp_path / "seen.pt")
    rig.assert_same(seen["held"], torch.load(tmp_path / "sent.pt"))
    assert seen["refused"] == "weight 'model.norm.weight' did not arrive as it left: the fingerprints differ"
    expected = [*hybrid_ranks.triples()]
    assert [(name, alias) for name, *_, alias, _ in seen["received"]] == [(n, a) for n, _, a in expected]
    for (name, shape, dtype, alias, tensor), (_, sent, _) in zip(seen["received"], expected, strict=True):
        assert (shape, dtype) == (tuple(sent.shape), sent.dtype), name
        assert tensor is None if alias else tensor.equal(sent), name
    assert seen["told"] == "the sending side failed: RunError: the trainer ran out of luck"


def test_a_process_receives_what_it_sent_once() -> None:
    transport = resolve("weight_transports", "in_process")()
    with pytest.raises(RunError, match="nothing was sent"):
        transport.receive()
    with lend(hybrid_ranks.triples(), bucket_bytes=100) as stream:
        transport.send(stream)
        assert transport.receive() is stream
    with pytest.raises(RunError, match="nothing was sent"):
        transport.receive()


@pytest.mark.skipif(dist.is_nccl_available(), reason="torch has NCCL")
def test_nccl_is_refused_where_torch_has_none() -> None:
    hardware = resolve("hardware", "cpu")(PluginConfig(name="cpu"))
    with pytest.raises(RunError, match="this torch has no NCCL"):
        resolve("weight_transports", "nccl")(Meeting(store=dist.HashStore(), rank=0, size=2, hardware=hardware))
