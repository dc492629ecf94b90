"""Ranks that share the rows of a batch do what plain PyTorch does with whole rows in one process."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsdp_rig as rig
import fsdp_sequence_ranks
import pytest
import torch
import torch.multiprocessing as multiprocessing

from drivetrain import BackendContext, UserError, dispatch_call, resolve
from drivetrain.config import ModelConfig, PluginConfig
from drivetrain.metrics import Mean, Sum
from drivetrain.workers import ActorRolloutRefWorker
from drivetrain_backend_common.rows import Tokens
from drivetrain_backend_fsdp.backend import FSDPBackend
from drivetrain_backend_fsdp.config import FSDPConfig
from drivetrain_backend_fsdp.packing import pack
from drivetrain_backend_fsdp.ulysses import SequenceRanks

FAMILIES = ("gemma2", "gemma3", "mixtral", "qwen2_moe", "qwen3_moe")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Heads of queries / of keys: 4 / 1, 4 / 2, 4 / 2 with norms, and with windows that sequences are longer than; and
    mixtures of experts."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("llama", "llama_gqa", "qwen3", *FAMILIES)}
    rig.write_model("llama", folders["llama"], num_key_value_heads=1)
    rig.write_model("llama", folders["llama_gqa"])
    rig.write_model("qwen3", folders["qwen3"])
    for name in FAMILIES:
        rig.write_model(name, folders[name])
    return folders


def plain(model: Path) -> dict[str, Any]:
    """What :func:`fsdp_sequence_ranks.learn` finds, from padded rows in one process without the backend."""
    data = rig.batch()
    with torch.no_grad():
        log_probs, entropy = rig.plain_outputs(rig.plain(model), data, 0.8)
    real = data.batch["attention_mask"][:, rig.PROMPT :] == 1
    loss, gradients = rig.plain_gradients(model, data)
    _, tempered = rig.plain_gradients(model, data, temperature=0.8)
    trained = dict(rig.plain(model).named_parameters())
    groups = [{"params": [p for p in trained.values() if p.dim() > 1], "weight_decay": 0.01},
              {"params": [p for p in trained.values() if p.dim() == 1], "weight_decay": 0.0}]  # fmt: skip
    optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-3)
    for name, parameter in trained.items():
        parameter.grad = tempered[name]
    norm = float(torch.nn.utils.clip_grad_norm_(trained.values(), 0.5))
    optimizer.step()
    outputs = {"log_probs": torch.where(real, log_probs, 0).float(), "entropy": torch.where(real, entropy, 0).float()}
    return {"loss": loss, "gradients": gradients, "outputs": outputs, "norm": norm,
            "weights": {name: p.detach() for name, p in trained.items()}}  # fmt: skip


def assert_learnt(got: dict[str, Any], want: dict[str, Any], rows: slice = slice(None)) -> None:
    for name, column in got["outputs"].items():
        torch.testing.assert_close(column, want["outputs"][name][rows], atol=2e-5, rtol=1e-5)
    assert got["metrics"]["loss"] == pytest.approx(want["loss"], rel=2e-5)
    rig.assert_close(got["gradients"], want["gradients"], 5e-6)
    assert got["step"]["grad_norm"] == pytest.approx(want["norm"], rel=2e-5)
    for name, tensor in want["weights"].items():
        if name in got["weights"]:  # tied weights come once
            torch.testing.assert_close(got["weights"][name], tensor, atol=1e-5, rtol=0)


def test_a_pair_of_ranks_equals_plain_pytorch(models: dict[str, Path], tmp_path: Path) -> None:
    multiprocessing.spawn(fsdp_sequence_ranks.pair, (models, tmp_path), nprocs=2)
    ranks = [torch.load(tmp_path / f"seen-{rank}.pt") for rank in range(2)]
    for name in ("llama", "llama_gqa", "qwen3", "gemma2"):
        want = plain(models[name])
        for rank in ranks:
            assert_learnt(rank[name], want)
    made = rig.backend(models["llama"], **fsdp_sequence_ranks.OPTIONS)
    metrics = fsdp_sequence_ranks.gradients(made, rig.batch(), slice(None))["metrics"]
    assert {"kl", "entropy", "clip_fraction"} < set(metrics)
    for rank in ranks:
        assert rank["llama"]["metrics"] == pytest.approx(metrics, rel=2e-5)
    one = fsdp_sequence_ranks.learn(
        rig.critic(models["qwen3"], **fsdp_sequence_ranks.OPTIONS), rig.critic_batch(), slice(None), rig.VALUE_TERMS
    )
    fine = plain(models["qwen3"])["outputs"]["log_probs"]
    for rank in ranks:
        assert_learnt(rank["critic"], one | {"loss": one["metrics"]["loss"], "norm": one["step"]["grad_norm"]})
        difference = (rank["coarse"] - fine).abs()
        assert 0 < float(difference.max()) and float(difference.mean()) < 0.05
        assert "different rows" in rank["rows"] and "sharded" in rank["live"]
        assert len(rank["mixed"]) == 2 and all("shared by 2 ranks gives other" in message for message in rank["mixed"])
    for name in FAMILIES[1:]:  # sharded, with rows of each rank's own
        loss, want_gradients = rig.plain_gradients(models[name], rig.batch())
        for rank in ranks:
            assert rank["sharded"][name]["metrics"]["loss"] == pytest.approx(loss, rel=2e-5)
            rig.assert_close(rank["sharded"][name]["gradients"], want_gradients, 5e-6)
    for name, outputs in ranks[0]["flex"].items():
        want_outputs = plain(models[name])["outputs"]["log_probs"]
        assert outputs.equal(ranks[1]["flex"][name])
        torch.testing.assert_close(outputs, want_outputs, atol=2e-5, rtol=1e-5)
    want = plain(models["qwen3"])
    for rank in ranks:
        assert rank["compiled"]["metrics"]["loss"] == pytest.approx(want["loss"], rel=2e-5)
        rig.assert_close(rank["compiled"]["gradients"], want["gradients"], 5e-6)


def test_two_pairs_and_four_ranks_equal_plain_pytorch(models: dict[str, Path], tmp_path: Path) -> None:
    chosen = {name: models[name] for name in ("llama", "qwen3")}
    multiprocessing.spawn(fsdp_sequence_ranks.square, (chosen, tmp_path), nprocs=4)
    ranks = [torch.load(tmp_path / f"seen-{rank}.pt") for rank in range(4)]
    for name, model in chosen.items():
        want = plain(model)
        for number, rank in enumerate(ranks):
            assert_learnt(rank[name]["learn"], want, slice(0, 9) if number < 2 else slice(9, 12))
            for case in ("alone", "nothing"):
                assert rank[name][case]["metrics"]["loss"] == pytest.approx(want["loss"], rel=2e-5)
                rig.assert_close(rank[name][case]["gradients"], want["gradients"], 5e-6)
            if name == "llama":
                assert_learnt(rank["four"], want)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_shares_make_up_the_row(size: int) -> None:
    data = rig.batch(11)
    mask = data.batch["response_mask"]
    tokens = Tokens.of(data.batch["input_ids"], data.batch["attention_mask"], mask, vocab_size=rig.VOCAB)
    whole = pack(tokens, range(11), torch.device("cpu"))
    shares = [pack(tokens, range(11), torch.device("cpu"), SequenceRanks(None, rank, size)) for rank in range(size)]
    length = whole.input_ids.shape[1]
    filling = -length % size
    width = (length + filling) // size
    assert {share.input_ids.shape[1] for share in shares} == {width}
    for name in ("input_ids", "position_ids"):
        together = torch.cat([getattr(share, name) for share in shares], dim=1)
        assert together[:, :length].equal(getattr(whole, name)) and not together[:, length:].any()
    ends = torch.tensor(whole.lengths).cumsum(0).tolist()
    assert {rank * width for rank in range(1, size)} - set(ends)  # a sequence is cut
    assert sorted(torch.cat([share.own for share in shares]).tolist()) == list(range(len(whole.row)))
    for rank, share in enumerate(shares):
        assert share.lengths == (*whole.lengths, *[1] * filling)
        assert share.target.equal(whole.target[share.own]) and share.row.equal(whole.row)
        assert (share.predictor + rank * width).equal(whole.predictor[share.own])


def test_what_does_not_divide_is_refused(qwen2: Path) -> None:
    with pytest.raises(UserError, match="sequence_parallel=2 does not divide the 1 processes"):
        rig.backend(qwen2, sequence_parallel=2)
    with pytest.raises(UserError, match="sequence_parallel=2 does not divide the 3 processes"):
        rig.backend(qwen2, world_size=3, sequence_parallel=2)
    with pytest.raises(UserError, match="ranks hold no shares"):
        rig.backend(qwen2, role="reward", learns=False, world_size=2, sequence_parallel=2)
    query, key = torch.zeros(1, 4, 6, 8), torch.zeros(1, 2, 6, 8)
    with pytest.raises(UserError, match="4 attention heads do not divide"):
        SequenceRanks(None, 0, 3).to_heads(query, key, key)


def test_a_reward_model_with_shared_rows_is_refused_by_the_config() -> None:
    shared, single = FSDPConfig(sequence_parallel=2), FSDPConfig()
    actor = SimpleNamespace(backend=shared)
    run: Any = SimpleNamespace(actor=actor, reward_model=SimpleNamespace(backend=shared))
    (problem,) = shared.check(run, None)
    assert problem.key == "sequence_parallel" and "reward_model.backend" in problem.mend
    for allowed in (None, SimpleNamespace(backend=single), SimpleNamespace(backend=None)):
        assert not list(shared.check(SimpleNamespace(actor=actor, reward_model=allowed), None))


def layouts(model: Path, world_size: int, size: int) -> list[Any]:
    def context(rank: int) -> BackendContext:
        return BackendContext(role="actor", model=ModelConfig(path=model), optimizer=None, max_grad_norm=None,
                              hardware=resolve("hardware", "cpu")(PluginConfig(name="cpu")), rank=rank,
                              world_size=world_size, seed=1)  # fmt: skip

    return [FSDPBackend(FSDPConfig(sequence_parallel=size), context(rank)).layout for rank in range(world_size)]


def test_calls_are_split_over_groups_and_collected_once(qwen2: Path) -> None:
    places, data = layouts(qwen2, 4, 2), rig.batch()
    assert [(place.dp, place.cp) for place in places] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    call = dispatch_call(ActorRolloutRefWorker, "update_actor", places, (), {"batch": data})
    rows = [[tuple(row) for row in kwargs["batch"].batch["input_ids"].tolist()] for _, kwargs in call.calls]
    assert rows[0] == rows[1] and rows[2] == rows[3]
    assert sorted(rows[0] + rows[2]) == sorted(map(tuple, data.batch["input_ids"].tolist()))
    metrics = call.collect([{"rows": Sum(len(part)), "loss": Mean(0.5, 1)} for part in rows])
    assert metrics["rows"].result() == 12 and metrics["loss"].result() == 0.5
    call = dispatch_call(ActorRolloutRefWorker, "compute_log_prob", places, (), {"batch": data})
    result = call.collect([kwargs["batch"].select(["input_ids"]) for _, kwargs in call.calls])
    assert result.batch["input_ids"].equal(data.batch["input_ids"])
