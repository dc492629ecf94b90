"""What each of two processes does in test_hybrid_end_to_end: a worker of the policy, called by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from drivetrain import ActorRolloutRefWorker, DataProto, LossTerm, RunConfig
from drivetrain.config.resolve import load_config
from drivetrain.driver.prompts import PromptSource
from drivetrain.driver.text import load_tokenizer, pad_token_id
from drivetrain.numerics import Counts, group_index
from drivetrain.seam.registry import get_registry, resolve

PROMPTS, SAMPLES = 6, 4


def prompts_of(run: RunConfig) -> DataProto:
    """The first prompts of the run, as a rollout gets them."""
    tokenizer = load_tokenizer(run.model)
    dataset = resolve("datasets", run.data.train.name)(run.data.train)
    prompts = PromptSource(dataset, tokenizer, run.data, run.trainer.seed, where="data.train").next_batch(PROMPTS)
    prompts.meta_info = {**prompts.meta_info, "samples": SAMPLES, "step": 1, "pad_token_id": pad_token_id(tokenizer)}
    return prompts


def steps(run: RunConfig, rank: int, world_size: int) -> list[dict[str, Any]]:
    """Generate, compare log-probs and update, twice; then generate again."""
    worker = ActorRolloutRefWorker(run, "actor_rollout", rank=rank, world_size=world_size)
    worker.init_model()
    prompts, seen = prompts_of(run), []
    share = slice(PROMPTS * rank // world_size, PROMPTS * (rank + 1) // world_size)
    for version in range(3):
        metrics = worker.enter_generation(version)
        batch = worker.generate_sequences(prompts[share])
        worker.enter_training()
        ours = worker.compute_log_prob(batch)["old_log_probs"]
        mask = batch["response_mask"] == 1
        mismatch = float((ours - batch["rollout_log_probs"])[mask].abs().max())
        seen.append({"responses": batch["responses"], "mismatch": mismatch, **metrics})
        reward = (batch["responses"] % 7).float().mean(1, keepdim=True) - 3
        batch = batch.with_columns(old_log_probs=ours, advantages=reward * batch["response_mask"])
        parts: list[Any] = [None] * world_size
        if world_size > 1:
            dist.all_gather_object(parts, (batch["response_mask"], batch["uid"].tolist()))
        else:
            parts = [(batch["response_mask"], batch["uid"].tolist())]
        counts = Counts.of(torch.cat([m for m, _ in parts]), group_index([uid for _, uids in parts for uid in uids]))
        worker.update_actor(batch, [LossTerm(name="clip", args={"clip_low": 0.2, "clip_high": 0.2})], counts, 1.0)
    worker.close()
    return seen


def work(rank: int, config: Path, overrides: list[str], folder: Path) -> None:
    """Run on each of two ranks; writes what it saw to ``folder/seen-RANK.pt``."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    run = load_config(config, overrides, get_registry()).run
    torch.save(steps(run, rank, 2), folder / f"seen-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
