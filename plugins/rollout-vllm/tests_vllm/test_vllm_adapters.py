"""An adapter that is sent alone: tokens and log-probs are the trainer's, and what does not fit is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rig_vllm import ATOL, FAMILIES, Sent, Served, changed, furthest, prompts, request, train
from test_vllm_training import RAY, TASK

from drivetrain import BackendContext, WeightStreamError, resolve
from drivetrain.weights import lend
from drivetrain_hybrid_engine.colocated import Colocated
from drivetrain_hybrid_engine.config import ColocatedConfig

RANK = 4


@pytest.fixture(scope="module", params=FAMILIES)
def engine(request: pytest.FixtureRequest, models: dict[str, Path]) -> Iterator[Served]:
    served = Served(models[request.param], adapter_rank=RANK, sleep_level=1)
    yield served
    served.engine.close()


@pytest.fixture
def adapted(engine: Served) -> Served:
    """An engine that is awake, with whatever adapter."""
    engine.engine.wake()
    return engine


def trainer(served: Served) -> Any:
    from drivetrain_backend_fsdp.config import AdamWConfig, FSDPConfig, LoRAConfig

    context = served.engine.context
    backend = resolve("backends", "fsdp")(
        FSDPConfig(lora=LoRAConfig(rank=RANK, alpha=12)),
        BackendContext(role="actor", optimizer=AdamWConfig(lr=1e-2), max_grad_norm=1.0, model=context.model,
                       hardware=context.hardware, rank=0, world_size=1, seed=5),
    )  # fmt: skip
    backend.initialize()
    return backend


def move(backend: Any, seed: int) -> None:
    """Random numbers for A and B, which change what the model says a lot."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in backend.model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.1)


def test_every_sync_brings_the_adapter(adapted: Served) -> None:
    backend = trainer(adapted)
    hybrid = Colocated(ColocatedConfig(lora="adapter", bucket_bytes=8000, fingerprint="always"))
    hybrid.attach(backend, adapted.engine)
    asked = [request(row, str(at), (1, 2), max_tokens=12) for at, row in enumerate(prompts(6))]
    base, drawn = changed(adapted.folder, 0), []
    learnt = sum(p.nbytes for p in backend.model.parameters() if p.requires_grad)
    for version in range(3):
        told = hybrid.enter_generation(version)
        assert told["bytes"] == learnt and told["buckets"] > 3
        got = adapted.engine.generate_batch(asked)
        assert furthest(backend.model, asked, got) < ATOL
        assert (furthest(base, asked, got) < ATOL) == (version == 0), "B starts at 0"
        assert {c.weight_versions for group in got for c in group} == {((0, version),)}
        drawn.append([c.token_ids for group in got for c in group])
        hybrid.enter_training()
        move(backend, version)
    assert len(set(map(str, drawn))) == 3


def sent(backend: Any) -> Sent:
    with backend.adapter(bucket_bytes=1 << 30) as stream:
        return [(entry.name, entry.tensor.clone(), None) for bucket in stream for entry in bucket.entries]


FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
BROKEN = {
    "missing": (lambda sent: [one for one in sent if one[0] != FIRST], "was sent without its lora_A"),
    "doubled": (lambda sent: [*sent, sent[0]], "was sent twice"),
    "rank": (lambda sent: [(name, tensor[:2], None) for name, tensor, _ in sent], "rank 2; rollout.adapter_rank is 4"),
    "unknown": (lambda sent: [*sent, ("model.norm.weight", torch.ones(64), None)], "is no part of an adapter"),
    "other layer": (lambda sent: [(name.replace("q_proj", "x_proj"), t, None) for name, t, _ in sent], "x_proj"),
    "none": (lambda sent: [], "without a layer"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BROKEN)
def test_what_is_no_whole_adapter_is_refused(kind: str, adapted: Served) -> None:
    change, message = BROKEN[kind]
    backend = trainer(adapted)
    move(backend, 7)
    good = sent(backend)
    for tensors, says in ((change(good), message), (good, None)):
        with lend(tensors, bucket_bytes=8000, kind="adapter") as stream:
            if says:
                with pytest.raises(WeightStreamError, match=says):
                    adapted.engine.load_weights(stream, 1)
            else:
                adapted.engine.load_weights(stream, 1)
    asked = [request([5, 6, 7], max_tokens=8)]
    assert furthest(backend.model, asked, adapted.engine.generate_batch(asked)) < ATOL


def test_weights_of_the_model_are_refused(adapted: Served) -> None:
    with lend([("model.norm.weight", torch.ones(64), None)], bucket_bytes=8000) as stream:
        with pytest.raises(WeightStreamError, match="takes an adapter; a bucket of kind 'full'"):
            adapted.engine.load_weights(stream, 1)


LORA = (*TASK, "model.init=pretrained", "actor.backend.lora={rank: 8, alpha: 16}", "actor.optimizer.lr=3e-3",
        "trainer.steps=2", "trainer.eval_every=0", "data.eval.size=32", "data.batch_prompts=16",
        "algorithm.old_log_probs=recompute")  # fmt: skip
ALONE = ("hybrid_engine.lora=adapter", "rollout.adapter_rank=8", "rollout.sleep_level=1")


def test_merged_and_alone_and_apart_take_the_same_steps(tmp_path: Path) -> None:
    """All weights sent, and the adapter alone: within a process, to another, and from FSDP over two to TP 2."""
    apart = ("executor.name=ray", "executor.num_cpus=4", "hybrid_engine.name=disaggregated",
             "placement={pools: {train: [1], generate: [1]}, roles: {actor: train, rollout: generate}}")  # fmt: skip
    merged, _ = train(tmp_path / "merged", *LORA)
    alone, _ = train(tmp_path / "alone", *LORA, *ALONE)
    separate, _ = train(tmp_path / "separate", *LORA, *ALONE, *apart)
    split, _ = train(tmp_path / "split", *LORA, *ALONE, *RAY, "rollout.tensor_parallel_size=2")
    for rows in (alone, separate, split):
        for one, other in zip(merged[1:], rows[1:], strict=True):
            for name in ("train/reward", "train/loss", "train/grad_norm"):
                assert other[name] == pytest.approx(one[name], rel=1e-4, abs=1e-7), name
            assert other["train/rollout_mismatch"] < 1e-5
    assert max(abs(row["train/loss"]) for row in merged[1:]) > 1e-4
    assert all(row["sync/bytes"] < one["sync/bytes"] / 2 for one, row in zip(merged[2:], alone[2:]))
