"""GRPO trains an adapter from the command line, and the policy without it is the reference."""

from __future__ import annotations

import json
from pathlib import Path

import tiny
import torch
from safetensors.torch import load_file

SAID = "role ref is the actor without its adapter"
ADAPTED = (
    "actor.backend.lora={rank: 8, alpha: 16}", "actor.optimizer.lr=1e-2", "algorithm.kl_coef=0.05",
    "algorithm.entropy_coef=0.1", "algorithm.old_log_probs=recompute", "trainer.steps=3",
)  # fmt: skip


def metrics_of(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_grpo_trains_an_adapter(tmp_path: Path, drivetrain) -> None:
    _, grpo = tiny.write_configs(tmp_path)
    run_dir = tmp_path / "runs/grpo"
    out = drivetrain("train", grpo, *ADAPTED, "trainer.save_every=2", "trainer.keep_checkpoints=9")
    assert SAID in out.stdout and "actor + rollout + ref on" in out.stdout
    rows = metrics_of(run_dir)
    kl = [row["train/kl"] for row in rows[1:]]
    assert kl[0] < 1e-6 and kl[2] > 1e-4  # the first update starts at the reference
    # the rollout samples with the adapter on: its log-probs are the trainer's
    assert all(row["train/rollout_mismatch"] < 1e-5 for row in rows[1:])

    [state] = run_dir.glob("checkpoints/step-*2/actor/rank-0.safetensors")
    held = [name for name in load_file(state) if not name.startswith("rng.")]
    assert held and all(".lora_" in name for name in held)
    drivetrain("train", run_dir / "config.yaml", "--resume", state.parents[1])
    again = metrics_of(run_dir)
    same = [name for name in rows[3] if name.startswith(("train/", "eval/"))]
    assert {"train/kl", "train/grad_norm"} <= set(same)
    assert {name: again[3][name] for name in same} == {name: rows[3][name] for name in same}

    drivetrain("export", run_dir, tmp_path / "merged")
    base, merged = weights(tmp_path / "model"), weights(tmp_path / "merged")
    assert base.keys() == merged.keys()
    moved = {name for name in base if not base[name].equal(merged[name])}
    assert len(moved) == 14 and all("_proj." in name for name in moved)
    drivetrain("export", run_dir, tmp_path / "adapter", "actor.backend.lora.export=adapter", "ref=null")
    assert (tmp_path / "adapter" / "adapter_config.json").is_file()


def test_a_rollout_with_weights_of_its_own_gets_them_merged(tmp_path: Path, drivetrain) -> None:
    _, grpo = tiny.write_configs(tmp_path)
    drivetrain("train", grpo, *ADAPTED, "hybrid_engine.name=colocated", "hybrid_engine.sharing=never")
    rows = metrics_of(tmp_path / "runs/grpo")[1:]
    assert rows[2]["train/kl"] > 1e-4 and rows[2]["sync/bytes"] > 0
    assert all(row["train/rollout_mismatch"] < 1e-5 for row in rows)


def test_a_reference_of_its_own_is_loaded(tmp_path: Path, drivetrain) -> None:
    _, grpo = tiny.write_configs(tmp_path)
    tiny.write_model(tmp_path / "other", seed=5)
    own = ("ref.backend.name=fsdp", f"ref.model.path={tmp_path / 'other'}", "trainer.steps=1")
    out = drivetrain("train", grpo, *ADAPTED, *own)
    assert SAID not in out.stdout
    assert metrics_of(tmp_path / "runs/grpo")[1]["train/kl"] > 1e-3


def test_what_is_refused(tmp_path: Path, drivetrain) -> None:
    _, grpo = tiny.write_configs(tmp_path)
    differs = ("ref.backend.name=fsdp", "ref.backend.lora.rank=3")
    done = drivetrain("train", grpo, *ADAPTED, *differs, code=2)
    assert "ref.backend cannot differ from actor.backend" in done.stderr
    assert "this model does not learn, so it has no adapter" in done.stderr
    done = drivetrain("train", grpo, *ADAPTED, "actor.backend.lora.targets=[q_prj]", code=2)
    assert "no linear layer 'q_prj'" in done.stderr and "actor.backend.lora.targets" in done.stderr
    done = drivetrain("train", grpo, "actor.backend.lora.rnak=3", code=2)
    assert "did you mean rank?" in done.stderr
