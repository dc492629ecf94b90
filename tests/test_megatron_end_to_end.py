"""GRPO with models of megatron-core is GRPO with those of transformers: the same tokens and the same numbers."""

from __future__ import annotations

import json
from pathlib import Path

import hybrid_workers
import pytest
import recorded
import tiny
import torch
import torch.multiprocessing as multiprocessing
from recorded import train
from transformers import AutoModelForCausalLM

from drivetrain.config.resolve import load_config
from drivetrain.driver import checkpoints
from drivetrain.seam.registry import get_registry
from drivetrain.testing.processes import install

STEPS = 5


def test_tensor_and_data_ranks_train_as_fsdp_does(tmp_path: Path, drivetrain) -> None:
    _, config = tiny.write_configs(tmp_path)
    about = tmp_path / "model" / "config.json"  # transformers gives a pad token no gradient where it is read
    about.write_text(json.dumps(json.loads(about.read_text()) | {"pad_token_id": None}))
    (tmp_path / "score.py").write_text("def score(response):\n    return float(sum(map(ord, response)) % 7) / 7\n")
    pythonpath = install(Path(recorded.__file__), tmp_path / "site")
    common = ["hybrid_engine.name=colocated", "actor.mini_batch_prompts=6", "algorithm.old_log_probs=recompute",
              "algorithm.kl_coef=0.1",
              "actor.optimizer.eps=1e-4",  # hides the rounding of gradients that cancel out
              f"rewards=[{{name: function, path: '{tmp_path / 'score.py'}:score'}}]"]  # fmt: skip
    ranks = ["actor.backend.name=megatron", "actor.backend.tensor_model_parallel_size=2", "executor.name=ray",
             "executor.processes=4", "executor.num_cpus=4",
             *(f"actor.backend.{part}_offload=true" for part in ("param", "grad", "optimizer"))]  # fmt: skip
    common += [f"trainer.steps={STEPS}", "rollout.name=recording"]
    folders: dict[str, Path] = {name: tmp_path / name for name in ("fsdp", "megatron")}
    for folder in folders.values():
        folder.mkdir()
    one = train(config, pythonpath, tmp_path / "one", *common, f"rollout.folder={folders['fsdp']}")
    two = train(config, pythonpath, tmp_path / "two", *common, *ranks, f"rollout.folder={folders['megatron']}",
                f"rollout.given={folders['fsdp']}")  # fmt: skip
    first, drawn = recorded.first(folders["fsdp"], STEPS), recorded.read(folders["megatron"])
    assert len(drawn) == STEPS * len(first)
    assert {seed: drawn[seed]["tokens"] for seed in first} == {seed: row["tokens"] for seed, row in first.items()}

    assert [row["step"] for row in two] == [row["step"] for row in one] == list(range(1, STEPS + 1))
    assert min(row["train/grad_norm"] for row in one) > 0
    for alone, together in zip(one, two):
        for key in ("loss", "grad_norm", "entropy", "kl", "approx_kl"):
            name = f"train/{key}"
            assert together[name] == pytest.approx(alone[name], rel=1e-5, abs=1e-6), (alone["step"], key)
    newest = checkpoints.complete(tmp_path / "two")[-1]
    sizes = ["executor.name=local", "actor.backend.tensor_model_parallel_size=1"]  # one process reads what all wrote
    drivetrain("export", newest, tmp_path / "exported", *sizes, "rollout={name: hf, max_response_tokens: 3}")
    learned, start = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("exported", "model"))
    assert not learned.model.norm.weight.equal(start.model.norm.weight)


def test_experts_of_two_ranks_generate_as_transformers_does(tmp_path: Path) -> None:
    """Each rank has half of the experts; the rollout has all of them, before and after updates."""
    _, config = tiny.write_configs(tmp_path)
    tiny.write_experts(tmp_path / "model")
    settings = ["hybrid_engine.name=colocated", f"data.batch_prompts={hybrid_workers.PROMPTS}"]
    ranks = ["actor.backend.name=megatron", "actor.backend.expert_model_parallel_size=2"]
    one = hybrid_workers.steps(load_config(config, settings, get_registry()).run, 0, 1)
    multiprocessing.spawn(hybrid_workers.work, (config, [*settings, *ranks], tmp_path), nprocs=2)
    seen = [torch.load(tmp_path / f"seen-{rank}.pt") for rank in range(2)]
    for step, *parts in zip(one, *seen, strict=True):
        assert all(part["mismatch"] < 1e-5 and part["bytes"] > 0 for part in parts)
        assert torch.cat([part["responses"] for part in parts]).equal(step["responses"])
    assert not one[0]["responses"].equal(one[2]["responses"])
