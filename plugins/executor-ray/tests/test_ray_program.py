"""A training step written with worker groups, as its user writes it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ray_rig import config_of

from drivetrain import ActorRolloutRefWorker, CriticWorker, DataProto, compute_advantage
from drivetrain.metrics import to_floats
from drivetrain_executor_ray import (
    Crew,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    create_colocated_worker_cls,
)


def batch_of(rows: int) -> dict[str, object]:
    ids = torch.tensor([[1, 4 + row % 10, 17, 4 + row // 10, 16] for row in range(rows)])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def reward_fn(batch: DataProto) -> torch.Tensor:
    """One for each response that starts with an even token."""
    scores = torch.zeros(batch["responses"].shape)
    scores[:, 0] = (batch["responses"][:, 0] % 2 == 0).float()
    return scores


def test_a_step_of_ppo(cluster: None, folder: Path) -> None:
    config = config_of(folder)
    batch_dict = batch_of(8)
    pool = RayResourcePool(process_on_nodes=[2], use_gpu=False, max_colocate_count=1)
    cls = create_colocated_worker_cls(
        {
            "actor_rollout": RayClassWithInitArgs(cls=ActorRolloutRefWorker, config=config, role="actor_rollout"),
            "critic": RayClassWithInitArgs(cls=CriticWorker, config=config),
        }
    )
    crew = Crew()
    wg = RayWorkerGroup(resource_pool=pool, ray_cls_with_init=cls, crew=crew).spawn(
        prefix_set=["actor_rollout", "critic"]
    )
    wg["critic"].init_model()
    wg["actor_rollout"].init_model()
    batch = DataProto.from_single_dict(batch_dict)
    gen = batch.pop(["input_ids", "attention_mask"])
    batch = batch.union(wg["actor_rollout"].generate_sequences(gen))
    batch = batch.union(wg["critic"].compute_values(batch))
    batch.batch["token_level_scores"] = reward_fn(batch)
    batch = compute_advantage(batch, gamma=0.99, lam=0.95)
    critic, actor = wg["critic"].update_critic(batch), wg["actor_rollout"].update_actor(batch)

    mask = batch["response_mask"].bool()
    assert torch.allclose(batch["old_log_probs"][mask], batch["rollout_log_probs"][mask], atol=1e-4)
    assert to_floats(critic)["grad_norm"] > 0 and to_floats(actor)["grad_norm"] > 0
    again = wg["actor_rollout"].compute_log_prob(batch)
    assert not torch.allclose(again["old_log_probs"][mask], batch["old_log_probs"][mask], atol=1e-4)
    assert torch.equal(wg["critic"].compute_values(batch)["values"], wg["critic"].compute_values(batch)["values"])
    crew.end()


def test_two_processes_train_as_one_does(cluster: None, folder: Path) -> None:
    """The same prompts, tokens, losses and gradients, whatever the number of processes."""
    found = []
    for processes in (1, 2):
        crew = Crew()
        made = RayClassWithInitArgs(cls=ActorRolloutRefWorker, config=config_of(folder), role="actor_rollout")
        pool = RayResourcePool([processes], use_gpu=False)
        wg = RayWorkerGroup(pool, made, crew=crew)
        wg.init_model()
        prompts = DataProto.from_single_dict({**batch_of(7), "uid": [f"p{row}" for row in range(7)]})
        batch = wg.generate_sequences(prompts)
        batch = batch.with_columns(token_level_scores=reward_fn(batch), values=torch.zeros(batch["responses"].shape))
        batch = compute_advantage(batch, gamma=1.0, lam=1.0)
        metrics = to_floats(wg.update_actor(batch))
        found.append((batch, metrics, wg.generate_sequences(prompts)))
        crew.end()
    (one, one_metrics, one_next), (two, two_metrics, two_next) = found
    assert torch.equal(one["responses"], two["responses"])
    assert two_metrics["loss"] == pytest.approx(one_metrics["loss"], abs=1e-6)
    assert two_metrics["grad_norm"] == pytest.approx(one_metrics["grad_norm"], rel=1e-4)
    assert torch.equal(one_next["responses"], two_next["responses"])
