"""Offload of shards: two processes over gloo."""

from pathlib import Path

import fsdp_offload
import pytest
import torch
import torch.multiprocessing as multiprocessing
from transformers import AutoModelForCausalLM


def test_shards_move_and_nothing_changes(qwen2: Path, tmp_path: Path) -> None:
    multiprocessing.spawn(fsdp_offload.work, (qwen2, tmp_path), nprocs=2)
    for rank in range(2):
        seen = torch.load(tmp_path / f"seen-{rank}.pt")
        assert seen["freed"] and set(seen["freed"]) == {0}
        assert "role 'actor' has its parameters and its optimizer in host memory" in seen["refused"]
        assert seen["updates"]["moves"] is True and seen["updates"]["within"] is True
        for got, want in zip(*seen["updates"]["host"], strict=True):
            assert got == pytest.approx(want, rel=1e-6)  # squares of norms are summed in another order
        assert seen["exact"] == dict.fromkeys(("round_trip", "objects", "moves", "within", "values"), True)
        plain, host = seen["weights"]
        assert plain.keys() == host.keys()
        for name, tensor in plain.items():
            torch.testing.assert_close(host[name], tensor, atol=1e-6, rtol=0)
        assert seen["again"] == seen["next"]
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    for name, tensor in exported.named_parameters():
        assert tensor.equal(host[name])
