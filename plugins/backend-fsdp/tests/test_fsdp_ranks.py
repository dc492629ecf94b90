"""Two processes over gloo do what one does."""

from pathlib import Path

import fsdp_ranks
import fsdp_rig as rig
import pytest
import torch
import torch.multiprocessing as multiprocessing
from transformers import AutoModelForCausalLM


def test_two_ranks_equal_one(qwen2: Path, tmp_path: Path) -> None:
    one = rig.backend(qwen2, max_grad_norm=0.5)
    forward = one.forward(rig.batch(), ["log_probs", "entropy"], temperature=0.8)
    updates = [fsdp_ranks.update(one, slice(None), factor) for factor in (1.0, 0.5, 1.0)]
    weights = fsdp_ranks.whole_weights(one)
    (tmp_path / "one").mkdir()
    one.save(tmp_path / "one")
    following = fsdp_ranks.update(one, slice(None))

    multiprocessing.spawn(fsdp_ranks.work, (qwen2, tmp_path, tmp_path / "one"), nprocs=2)
    ranks = [torch.load(tmp_path / f"seen-{rank}.pt") for rank in range(2)]
    for name in forward:
        together = torch.cat([rank["forward"][name] for rank in ranks])
        torch.testing.assert_close(together, forward[name], atol=1e-5, rtol=0)
        torch.testing.assert_close(ranks[0]["forward_alone"][name], forward[name], atol=1e-5, rtol=0)
        assert ranks[1]["forward_alone"][name].shape == (0, forward[name].shape[1])
    for rank in ranks:
        for got, want in zip([*rank["updates"], rank["next"]], [*updates, following], strict=True):
            assert got == pytest.approx(want, rel=2e-5)
        assert rank["weights"].keys() == weights.keys()
        for name, tensor in weights.items():
            torch.testing.assert_close(rank["weights"][name], tensor, atol=1e-5, rtol=0)
        assert rank["refused"] and rank["unchanged"]
        assert "sharded" in rank["live"]
        assert rank["again"] == rank["next"]
        assert rank["from_one"] == pytest.approx(following, rel=2e-5)

    resumed = rig.backend(qwen2, max_grad_norm=0.5, model={"init": "random"})
    resumed.load(tmp_path / "state")  # written by two processes
    assert fsdp_ranks.update(resumed, slice(None)) == pytest.approx(following, rel=2e-5)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert type(exported).__name__ == "Qwen2ForCausalLM"
    for name, tensor in exported.named_parameters():
        assert tensor.equal(ranks[0]["weights"][name])
