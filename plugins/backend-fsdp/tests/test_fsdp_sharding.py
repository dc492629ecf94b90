"""Four processes over gloo, sharded in each way, do what plain PyTorch does in one."""

import json
from pathlib import Path

import fsdp_judges as judges
import fsdp_meshes as meshes
import fsdp_ranks
import fsdp_rig as rig
import pytest
import torch
import torch.multiprocessing as multiprocessing

from drivetrain import UserError


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return judges.write("Llama", tmp_path_factory.mktemp("llama"), labels=1)


@pytest.fixture(scope="module")
def run(qwen2: Path, llama: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict]]:
    """The folder that four ranks wrote to, and what each saw."""
    folder = tmp_path_factory.mktemp("four")
    multiprocessing.spawn(meshes.sharded, (qwen2, llama, folder), nprocs=4)
    return folder, [torch.load(folder / f"seen-{rank}.pt") for rank in range(4)]


@pytest.fixture(scope="module")
def one(qwen2: Path) -> dict:
    """What one process does."""
    made = rig.backend(qwen2, **meshes.STEP)
    seen = {"forward": made.forward(rig.batch(), ["log_probs", "entropy"], temperature=0.8)}
    seen["updates"] = [fsdp_ranks.update(made, slice(None), factor) for factor in (1.0, 0.5)]
    seen["weights"] = fsdp_ranks.whole_weights(made)
    seen["next"] = fsdp_ranks.update(made, slice(None))
    return seen


@pytest.mark.parametrize(("mode", "mesh"), [("full", (4,)), ("hybrid", (2, 2)), ("replicas", (4, 1)), ("kept", (4,))])
def test_equal_to_plain_pytorch(qwen2: Path, run: tuple, one: dict, mode: str, mesh: tuple) -> None:
    loss, want = rig.plain_gradients(qwen2, rig.batch())
    norm = float(torch.nn.utils.get_total_norm(want.values()))
    clipped = {name: gradient * 0.5 / norm for name, gradient in want.items()}
    size = sum(p.numel() for p in rig.plain(qwen2).parameters())
    for rank in run[1]:
        seen = rank[mode]
        assert seen["mesh"] == mesh
        got_loss, got = seen["gradients"]
        assert got_loss == pytest.approx(loss, rel=1e-5)
        rig.assert_close(got, clipped, 5e-6)
        for update, expected in zip(seen["updates"], one["updates"], strict=True):
            assert update == pytest.approx(expected, rel=2e-5)
        assert seen["weights"].keys() == one["weights"].keys()
        for name, tensor in one["weights"].items():
            torch.testing.assert_close(seen["weights"][name], tensor, atol=1e-5, rtol=0)
        assert seen["state"] == 4 * seen["local"]  # parameters are shards again
    shards, split = fsdp_ranks.joined([rank[mode]["shards"] for rank in run[1]])
    assert shards.keys() == one["weights"].keys()
    assert all(tensor.equal(run[1][0][mode]["weights"][name]) for name, tensor in shards.items())
    assert split == (0 if mesh[-1] == 1 else len(shards))
    for name, whole in one["forward"].items():
        together = torch.cat([rank[mode]["forward"][name] for rank in run[1]])
        torch.testing.assert_close(together, whole, atol=1e-5, rtol=0)
    assert sum(rank[mode]["local"] for rank in run[1]) == size * (4 // mesh[-1])


def test_one_replica_writes_the_checkpoint(qwen2: Path, run: tuple) -> None:
    written: dict[str, int] = {}
    for rank in range(4):
        layout = json.loads((run[0] / "state" / f"rank-{rank}.json").read_text())
        assert bool(layout["tensors"]) == (rank < 2)  # ranks 0 and 1 are the first replica
        for name in layout["tensors"]:
            written[name] = written.get(name, 0) + 1
    names = [f"model.{name}" for name, _ in rig.plain(qwen2).named_parameters()]
    assert all(written[name] == 2 for name in names)


def test_resumed_on_fewer_ranks(qwen2: Path, run: tuple, one: dict, tmp_path: Path) -> None:
    folder, ranks = run
    for rank in ranks:
        assert rank["again"] == rank["next"] == pytest.approx(one["next"], rel=2e-5)
    written = folder / "state", folder / "state-of-four"
    multiprocessing.spawn(meshes.resumed, (qwen2, tmp_path, *written), nprocs=2)
    for rank in range(2):
        losses = torch.load(tmp_path / f"seen-{rank}.pt")
        assert len(losses) == 2 and all(seen == pytest.approx(one["next"], rel=2e-5) for seen in losses)
    alone = rig.backend(qwen2, model={"init": "random"}, **meshes.STEP)
    alone.load(folder / "state")
    alone.export(tmp_path / "export")
    live, offline = (sorted(path for path in (at / "export").iterdir()) for at in (folder, tmp_path))
    assert [path.name for path in live] == [path.name for path in offline]
    assert all(one.read_bytes() == other.read_bytes() for one, other in zip(live, offline))
    assert fsdp_ranks.update(alone, slice(None)) == pytest.approx(one["next"], rel=2e-5)
    exported = dict(rig.plain(folder / "export").named_parameters())
    assert all(tensor.equal(ranks[3]["hybrid"]["weights"][name]) for name, tensor in exported.items())


def test_bfloat16_is_gathered_beneath_float32(qwen2: Path, run: tuple) -> None:
    _, want = rig.plain_gradients(qwen2, rig.batch())
    precise = rig.backend(qwen2).forward(rig.batch(), ["log_probs"], temperature=1.0)["log_probs"]
    for rank in run[1]:
        seen = rank["bfloat16"]
        assert seen["dtypes"] == {(torch.bfloat16, torch.bfloat16)}
        assert seen["outputs"] == {torch.float32} and seen["masters"] == {torch.float32}
        for name, gradient in want.items():
            got = seen["gradients"][name]
            assert got.dtype == torch.float32
            assert float(torch.cosine_similarity(got.flatten(), gradient.flatten(), dim=0)) > 0.99, name
            assert float(got.norm() / gradient.norm()) == pytest.approx(1, abs=0.05), name
    together = torch.cat([rank["bfloat16"]["log_probs"] for rank in run[1]])
    torch.testing.assert_close(together, precise, atol=0.1, rtol=0)
    assert not together.bfloat16().float().equal(together)  # not rounded to bfloat16 on the way


def test_critic_and_reward_model(qwen2: Path, llama: Path, run: tuple) -> None:
    critic, data = rig.critic(qwen2, **meshes.STEP), rig.critic_batch()
    metrics = critic.update(data, rig.VALUE_TERMS, rig.counts(data), temperature=1.0, lr_factor=1.0)
    values = critic.forward(rig.batch(), ["values"], temperature=1.0)["values"]
    torch.testing.assert_close(torch.cat([rank["values"] for rank in run[1]]), values, atol=1e-5, rtol=0)
    scores = judges.scores(judges.worker(llama))
    for rank in run[1]:
        assert rank["critic"] == pytest.approx({name: metrics[name].result() for name in rank["critic"]}, rel=5e-5)
        torch.testing.assert_close(rank["scores"], scores, atol=1e-5, rtol=0)


def test_one_process_has_nothing_to_shard(qwen2: Path) -> None:
    with pytest.raises(UserError, match="one process cannot shard over 2"):
        rig.backend(qwen2, shard_size=2)
