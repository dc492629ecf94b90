"""What each of two processes does in test_vllm_ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

WANTED: dict[str, Any] = {"max_tokens": 16, "temperature": 0.9}


COUPLED = {
    "fsdp": ("actor.backend.name=fsdp", "rollout.tensor_parallel_size=2"),
    "megatron": ("actor.backend.name=megatron", "actor.backend.tensor_model_parallel_size=2"),
}
"""Trainers over two processes, and what vLLM is over them."""


def requests() -> list[Any]:
    from rig_vllm import prompts, request

    return [request(row, str(at), (1, 2, 3), **WANTED) for at, row in enumerate(prompts(6))]


def work(rank: int, models: dict[str, Path], folder: Path) -> None:
    """Engines over two processes and of one each, one after the other; writes what came to ``folder/seen-RANK.pt``."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    import warnings

    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    seen: dict[str, Any] = {}
    for family, size in (("qwen2", 2), ("llama", 2), ("llama", 1)):
        seen[f"{family}{size}"] = _serve(rank, models[family], size)
        dist.barrier()
    for name, words in COUPLED.items():
        seen[name] = _train(rank, models["llama"], folder / "run", words)
        dist.barrier()
    torch.save(seen, folder / f"seen-{rank}.pt")
    assert dist.get_world_size() == 2, "the workers' process group is theirs"
    dist.destroy_process_group()


def _serve(rank: int, model: Path, size: int) -> dict[str, Any]:
    from rig_vllm import Served

    served = Served(model, rank=rank, world_size=2, tensor_parallel_size=size)
    place = served.engine.layout
    mine = requests() if size == 2 else requests()[3 * rank : 3 * rank + 3]
    seen: dict[str, Any] = {"place": (place.dp, place.dp_size, place.tp, place.tp_size), "drawn": []}
    for version, seed in enumerate((0, 2)):
        served.load(seed, version)
        drawn = served.engine.generate_batch(mine)
        seen["drawn"].append([[(c.token_ids, c.log_probs, c.finish_reason) for c in group] for group in drawn])
    seen["heads"] = served.module.model.layers[0].self_attn.num_heads
    served.engine.close()
    return seen


def _train(rank: int, model: Path, folder: Path, words: tuple[str, ...]) -> dict[str, Any]:
    """The worker of a run: generate and update, twice; then generate again. Each rank gives rows of its own, or all."""
    from drivetrain import ActorRolloutRefWorker, DataProto, LossTerm, get_registry, load_config
    from drivetrain.numerics import Counts

    base = [
        f"model.path={model}", "algorithm.name=grpo", "actor.optimizer={name: adamw, lr: 1.0e-2}",
        "rollout={name: vllm, max_response_tokens: 8, kv_cache_bytes: 33554432}", "hybrid_engine.name=colocated",
        f"data.train={{name: jsonl, path: {folder}/prompts.jsonl}}", "data.batch_prompts=4",
        "rewards=[{name: exact_match}]", "hardware.name=cpu", "executor={name: ray, processes: 2}",
        f"trainer={{steps: 1, run_dir: {folder}}}",
    ]  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / "prompts.jsonl").write_text('{"prompt": "ab", "answer": "c"}\n')
    run = load_config(None, [*base, *words], get_registry()).run
    worker = ActorRolloutRefWorker(run, "actor_rollout", rank=rank, world_size=2)
    worker.init_model()
    ids = torch.randint(3, 128, (4, 5), generator=torch.Generator().manual_seed(1))
    whole = DataProto.from_dict({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    seen: dict[str, Any] = {"mismatch": [], "responses": []}
    for version in range(3):
        place = worker.layout("rollout")
        prompts = whole[2 * place.dp : 2 * place.dp + 2] if place.dp_size == 2 else whole
        prompts.meta_info = {"samples": 2, "step": version, "pad_token_id": 0, "recompute_log_probs": False}
        worker.enter_generation(version)
        batch = worker.generate_sequences(prompts)
        worker.enter_training()
        parts: list[Any] = [None, None]
        dist.all_gather_object(parts, batch.select(("input_ids", "attention_mask", "responses", "response_mask",
                                                    "rollout_log_probs"), (), ()))  # fmt: skip
        everything = DataProto.concat(parts) if place.dp_size == 2 else parts[0]
        rows = len(everything) // 2
        train = worker.layout("train")
        mine = everything[train.dp * rows : (train.dp + 1) * rows] if train.dp_size == 2 else everything
        ours = worker.compute_log_prob(mine)["old_log_probs"]
        mask = mine["response_mask"] == 1
        seen["mismatch"].append(float((ours - mine["rollout_log_probs"])[mask].abs().max()))
        seen["responses"].append(everything["responses"])
        scores = (mine["responses"] % 7).float().mean(1, keepdim=True) - 3
        mine = mine.with_columns(old_log_probs=ours, advantages=scores * mine["response_mask"])
        counts = Counts.of(everything["response_mask"], torch.arange(len(everything)))
        worker.update_actor(mine, [LossTerm(name="clip", args={"clip_low": 0.2, "clip_high": 0.2})], counts, 1.0)
    worker.close()
    return seen
