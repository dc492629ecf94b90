"""A run whose weights are sent takes the steps of a run that shares one module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hybrid_workers
import pytest
import tiny
import torch
import torch.multiprocessing as multiprocessing

from drivetrain import DataProto
from drivetrain.config.resolve import load_config
from drivetrain.driver.session import Session
from drivetrain.metrics import to_floats
from drivetrain.seam.registry import get_registry, resolve

STEPS = 4


def steps_of(config: Path, *overrides: str) -> list[tuple[DataProto, dict[str, float], dict[str, float]]]:
    """For each step: the batch, the metrics of learning, and those of the phases."""
    run = load_config(config, list(overrides), get_registry()).run
    algorithm: Any = resolve("algorithms", run.algorithm.name)(run.algorithm)
    done = []
    with Session(run) as session:
        assert session.train_prompts is not None
        for step in range(1, STEPS + 1):
            session.progress.step = step
            batch = algorithm.collect(session.roles, session.train_prompts.next_batch(run.data.batch_prompts))
            learned = to_floats(algorithm.learn(session.roles, batch))
            done.append((batch, learned, session.phases.take()))
    return done


def test_the_same_tokens_and_losses_as_with_one_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are equal; log-probs, and what follows from them, differ by rounding in matrix products."""
    _, grpo = tiny.write_configs(tmp_path)
    settings = ["data.batch_prompts=12", "actor.mini_batch_prompts=6", "algorithm.old_log_probs=recompute"]
    shared = steps_of(grpo, *settings, "hybrid_engine.name=shared")
    alone = steps_of(grpo, *settings, "hybrid_engine.name=colocated")
    sent = steps_of(grpo, *settings, "hybrid_engine.name=colocated", "hybrid_engine.sharing=never")
    for (batch, learned, _), (same_batch, same, phases) in zip(shared, alone, strict=True):
        assert same_batch["responses"].equal(batch["responses"]) and same == learned
        assert learned["rollout_mismatch_max"] <= 1e-5 and "rollout_is_weights" not in batch
        assert phases["sync/bytes"] == 0
    for (batch, learned, _), (other_batch, other, phases) in zip(shared, sent, strict=True):
        assert other_batch["responses"].equal(batch["responses"])
        assert other_batch["scores"].equal(batch["scores"])
        assert float((other_batch["rollout_log_probs"] - batch["rollout_log_probs"]).abs().max()) < 1e-5
        assert other["rollout_mismatch"] < 1e-5
        ratio = (other_batch["old_log_probs"] - other_batch["rollout_log_probs"]).exp()
        expected = torch.where(other_batch["response_mask"] == 1, ratio, 0.0)  # by default: the engines are two
        torch.testing.assert_close(other_batch["rollout_is_weights"], expected)
        for name in ("loss", "grad_norm", "entropy"):
            assert other[name] == pytest.approx(learned[name], rel=1e-4, abs=1e-6), name
        assert phases["sync/bytes"] > 0 and phases["sync/buckets"] == 1


def test_a_run_that_offloads_takes_the_same_steps(tmp_path: Path) -> None:
    """Bit for bit; the parameters are on the device while they are sent and trained, and its memory is told."""
    _, grpo = tiny.write_configs(tmp_path)
    settings = ["data.batch_prompts=12", "actor.mini_batch_prompts=6", "algorithm.kl_coef=0.1",
                "algorithm.old_log_probs=recompute", "hybrid_engine.name=colocated"]  # fmt: skip
    moves = [f"actor.backend.{part}_offload=true" for part in ("param", "grad", "optimizer")]
    stays = steps_of(grpo, *settings, "hybrid_engine.sharing=never")
    moved = steps_of(grpo, *settings, *moves)
    for (batch, learned, phases), (other_batch, other, other_phases) in zip(stays, moved, strict=True):
        assert all(other_batch[name].equal(batch[name]) for name in ("responses", "rollout_log_probs", "ref_log_probs"))
        assert other == learned
        assert other_phases["sync/bytes"] == phases["sync/bytes"] > 0
        assert not [name for name in phases if name.startswith("memory/")]
        names = {name.split("/")[1].rsplit("_", 2)[0] for name in other_phases if name.startswith("memory/")}
        assert names == {"sync", "generate", "log_probs", "ref_log_probs", "update"}
        for name in names:
            before, peak, after = (other_phases[f"memory/{name}_{at}_bytes"] for at in ("before", "peak", "after"))
            assert 0 < before <= peak and 0 < after <= peak


def test_the_same_config_over_two_ranks(tmp_path: Path) -> None:
    """Each rank generates with all weights of a model of which it holds a half; together the tokens of one process."""
    _, grpo = tiny.write_configs(tmp_path)
    overrides = ["hybrid_engine.name=colocated", f"data.batch_prompts={hybrid_workers.PROMPTS}"]
    one = hybrid_workers.steps(load_config(grpo, overrides, get_registry()).run, 0, 1)
    assert [step["bytes"] for step in one] == [0, 0, 0]
    multiprocessing.spawn(hybrid_workers.work, (grpo, overrides, tmp_path), nprocs=2)
    ranks = [torch.load(tmp_path / f"seen-{rank}.pt") for rank in range(2)]
    for step, *parts in zip(one, *ranks, strict=True):
        assert all(part["mismatch"] < 1e-5 and part["bytes"] > 0 for part in parts)
        assert torch.cat([part["responses"] for part in parts]).equal(step["responses"])
    assert not one[0]["responses"].equal(one[2]["responses"])


@pytest.mark.parametrize("sharing, said", [("always", False), ("never", True)])
def test_a_run_says_that_nothing_corrects_for_another_engine(
    tmp_path: Path, drivetrain: Any, sharing: str, said: bool
) -> None:
    _, grpo = tiny.write_configs(tmp_path)
    grpo.write_text(grpo.read_text().replace("  clip_high: 0.28\n", ""))  # which the loss does not read
    out = drivetrain("train", grpo, "trainer.steps=2", "hybrid_engine.name=colocated", "algorithm.kl_coef=0.1",
                     f"hybrid_engine.sharing={sharing}", "algorithm.policy_loss=kl", "algorithm.epochs=2",
                     "algorithm.old_log_probs=recompute")  # fmt: skip
    assert out.stdout.count("rollout_is auto comes to none: policy loss 'kl'") == said


def test_a_run_says_why_trainer_and_rollout_differ(tmp_path: Path, drivetrain: Any) -> None:
    """Once, in the first step; with what top_p makes by itself told from what engines make."""
    _, grpo = tiny.write_configs(tmp_path)
    shared = ["trainer.steps=3", "algorithm.old_log_probs=recompute", "--overwrite"]
    cut = drivetrain("train", grpo, "rollout.top_p=0.5", *shared).stderr
    assert cut.count("rollout mismatch") == cut.count("step 1: rollout mismatch") == 1 and "one-sided" in cut
    assert "rollout mismatch" not in drivetrain("train", grpo, *shared).stderr


def test_a_run_folder_is_evaluated_with_the_weights_of_its_checkpoint(tmp_path: Path, drivetrain: Any) -> None:
    """Also by a rollout with weights of its own, which it has read from the model that the run started from."""
    import json

    sft, grpo = tiny.write_configs(tmp_path)
    drivetrain("train", sft, "hybrid_engine.name=colocated", "hybrid_engine.sharing=never")
    rows = [json.loads(line) for line in (tmp_path / "runs/sft/metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["eval/accuracy"] > rows[0]["eval/accuracy"] and rows[-1]["sync/bytes"] > 0
    report = json.loads(drivetrain("eval", tmp_path / "runs/sft", "--json").stdout)
    assert report["eval/accuracy"] == rows[-1]["eval/accuracy"]
    refused = drivetrain("train", grpo, "hybrid_engine.name=colocated", "hybrid_engine.transport=gloo", code=2)
    assert "'gloo' is for weights that go to another process" in refused.stderr
