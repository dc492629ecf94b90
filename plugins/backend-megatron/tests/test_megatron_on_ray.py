"""Programs with worker groups on Ray, as users of Megatron write them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron_ray_rig import OFFLOADED, SECTIONS, Actor, ActorRollout, Critic, batch_of, config_of, write_run

from drivetrain import ActorRolloutRefWorker, DataProto, UserError, compute_advantage
from drivetrain.metrics import to_floats
from drivetrain_backend_megatron import MegatronGlobalInfo, MegatronRankInfo, MegatronRayWorkerGroup
from drivetrain_executor_ray import (
    Crew,
    RayClassWithInitArgs,
    RayResourcePool,
    create_colocated_worker_cls,
    ray_init,
)

TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("run")
    write_run(made)
    return made


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    leave = ray_init(num_cpus=8)
    yield
    leave()


@pytest.fixture
def crew(cluster: None) -> Iterator[Crew]:
    made = Crew()
    yield made
    made.end()


def rewarded(batch: DataProto) -> DataProto:
    """One for each response that starts with an even token."""
    scores = torch.zeros(batch["responses"].shape)
    scores[:, 0] = (batch["responses"][:, 0] % 2 == 0).float()
    return batch.with_columns(token_level_scores=scores)


def test_a_step_of_ppo_over_two_tensor_ranks_and_two_copies(crew: Crew, folder: Path) -> None:
    sizes = {TP: 2, "sequence_parallel": True}
    words = [f"{SECTIONS['actor']}.{key}={value}" for key, value in sizes.items()]
    config = config_of(folder, *words, *OFFLOADED)
    pool = RayResourcePool(process_on_nodes=[4], use_gpu=False, max_colocate_count=1)
    class_dict = {
        "actor_rollout": RayClassWithInitArgs(cls=ActorRollout, config=config, role="actor_rollout_ref"),
        "critic": RayClassWithInitArgs(cls=Critic, config=config),
    }
    wg = MegatronRayWorkerGroup(
        resource_pool=pool, ray_cls_with_init=create_colocated_worker_cls(class_dict=class_dict),
        default_megatron_kwargs=sizes, crew=crew,
    ).spawn(prefix_set=class_dict.keys())  # fmt: skip
    actor, critic = wg["actor_rollout"], wg["critic"]
    info = MegatronGlobalInfo(tp_size=2, pp_size=1, dp_size=2, cp_size=1, ep_size=1)
    assert actor.get_megatron_global_info() == info, "before there is a model"
    critic.init_model()
    actor.init_model()
    batch = batch_of(7)
    gen = batch.pop(["input_ids", "attention_mask"])
    batch = batch.union(actor.generate_sequences(gen))
    batch = batch.union(actor.compute_ref_log_prob(batch))
    batch = batch.union(critic.compute_values(batch))
    batch = compute_advantage(rewarded(batch), gamma=0.99, lam=0.95)
    learned = [to_floats(critic.update_critic(batch)), to_floats(actor.update_actor(batch))]

    assert all(metrics["grad_norm"] > 0 for metrics in learned)
    mask = batch["response_mask"].bool()
    assert torch.allclose(batch["old_log_probs"][mask], batch["rollout_log_probs"][mask], atol=1e-5)
    assert torch.equal(batch["old_log_probs"], batch["ref_log_probs"])
    after = actor.compute_log_prob(batch)["old_log_probs"]
    assert not torch.allclose(after[mask], batch["old_log_probs"][mask], atol=1e-3)
    assert torch.equal(actor.compute_ref_log_prob(batch)["ref_log_probs"], batch["ref_log_probs"])
    assert torch.equal(critic.compute_values(batch)["values"], critic.compute_values(batch)["values"])
    assert actor.get_megatron_global_info() == critic.get_megatron_global_info() == info
    for group, phases in (actor, ("update", "ref_log_probs")), (critic, ("update_critic", "values")):
        assert {f"memory/{phase}_peak_bytes" for phase in phases} <= group.take_memory()[0].keys()
    assert actor.get_megatron_rank_info(rank=3) == MegatronRankInfo(
        tp_rank=1, pp_rank=0, dp_rank=1, cp_rank=0, ep_rank=0
    )
    for call in (actor.by_dp, actor.by_dp_and_pp):
        assert had(call, 7) == {0: 4, 2: 4}, "the first tensor rank of each copy"


def test_a_worker_of_ones_own_over_two_stages(crew: Crew, folder: Path) -> None:
    """What a program gives over two processes, it gives in one."""
    alone = Actor(config_of(folder), "actor_ref")
    alone.init_model()
    batch = rewarded(sampled(folder, 7))
    expected = batch.union(alone.compute_log_prob(batch)).union(alone.compute_ref_log_prob(batch))
    expected = compute_advantage(expected.with_columns(values=torch.zeros(batch["responses"].shape)))
    with pytest.raises(UserError, match="only pad the batch"):
        alone.update_actor(expected.with_columns(is_padding=torch.arange(7) == 0))
    with pytest.raises(UserError, match="a reference does not learn"):
        alone.ref.update_policy(expected)
    losses = to_floats(alone.update_actor(expected))
    moved = alone.compute_log_prob(batch)
    alone.close()
    assert not dist.is_initialized()

    made = RayClassWithInitArgs(cls=Actor, config=config_of(folder, f"actor.backend.{PP}=2"), role="actor_ref")
    wg = MegatronRayWorkerGroup(RayResourcePool([2], use_gpu=False), made, crew=crew)
    assert wg.get_megatron_global_info().dp_size == 2, "each rank by itself, until there is a model"
    wg.init_model()
    assert wg.get_megatron_global_info() == MegatronGlobalInfo(tp_size=1, pp_size=2, dp_size=1, cp_size=1, ep_size=1)
    for found in (wg.compute_log_prob(batch), wg.compute_ref_log_prob(batch)):
        for name, column in found.batch.items():
            assert torch.allclose(column, expected[name], atol=1e-5), name
    metrics = to_floats(wg.update_actor(expected))
    assert metrics == pytest.approx(losses, rel=1e-4, abs=1e-5) and metrics["grad_norm"] > 0
    found = wg.compute_log_prob(batch)
    assert torch.allclose(found["old_log_probs"], moved["old_log_probs"], atol=1e-4)
    assert not torch.allclose(found["old_log_probs"], expected["old_log_probs"], atol=1e-2)

    assert had(wg.by_dp, 7) == {1: 7}, "all rows to both, and the result of the last stage"
    assert had(wg.by_dp_and_pp, 7) == {0: 4, 1: 4}, "half of the rows to each, one of them twice"
    assert wg.stages() == [0, 1]
    wg.begin_again({TP: 2})
    assert wg.get_megatron_global_info() == MegatronGlobalInfo(tp_size=2, pp_size=1, dp_size=1, cp_size=1, ep_size=1)
    assert [wg.get_megatron_rank_info(rank).tp_rank for rank in range(2)] == [0, 1]
    assert had(wg.by_dp, 7) == had(wg.by_dp_and_pp, 7) == {0: 7}
    assert wg.stages() == [0]


def had(call: Callable[[DataProto], DataProto], rows: int) -> dict[int, int]:
    """The ranks whose results came back, and how many rows each was given; all rows are there, and in order."""
    found = call(DataProto.from_dict({"row": torch.arange(rows)}))
    assert found["row"].tolist() == list(range(rows))
    return dict(zip(found["rank"].tolist(), found["rows"].tolist()))


def sampled(folder: Path, rows: int) -> DataProto:
    """Responses of one to four random tokens."""
    prompts, draw = batch_of(rows), torch.Generator().manual_seed(2)
    responses = torch.randint(3, 51, (rows, 4), generator=draw)
    mask = (torch.arange(4) <= torch.arange(rows)[:, None] % 4).long()
    return DataProto.from_single_dict({
        "responses": responses, "response_mask": mask,
        "input_ids": torch.cat([prompts["input_ids"], responses], dim=1),
        "attention_mask": torch.cat([prompts["attention_mask"], mask], dim=1),
    })  # fmt: skip


def test_settings_that_no_worker_takes_are_refused(folder: Path) -> None:
    made = RayClassWithInitArgs(cls=ActorRolloutRefWorker, config=None, role="actor")
    with pytest.raises(UserError, match="no worker derives from MegatronWorker"):
        MegatronRayWorkerGroup(RayResourcePool([1], use_gpu=False), made, default_megatron_kwargs={TP: 2})
