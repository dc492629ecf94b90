"""Runs by the command line: learning, on Ray with Megatron, and a process that dies while it generates."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import marked
import pytest
from rig_vllm import MAIN, environment, train

from drivetrain.testing.processes import install, marked_processes

ROOT = Path(__file__).parents[3]
QUICKSTART = ROOT / "examples" / "quickstart" / "grpo.yaml"
TASK = (QUICKSTART, "rollout.name=vllm", "rollout.kv_cache_bytes=67108864",
        "trackers=[{name: jsonl}]", "hardware.name=cpu",
        f"model.path={ROOT / 'examples' / 'quickstart' / 'model'}")  # fmt: skip
RAY = ("executor.name=ray", "executor.processes=2", "executor.num_cpus=4")
STEPS = 40


def test_the_quickstart_learns(tmp_path: Path) -> None:
    """Accuracy on prompts that are not trained on; with seeds 1 to 3 it is 0.53 to 0.56."""
    rows, _ = train(tmp_path / "run", *TASK, f"trainer.steps={STEPS}", f"trainer.eval_every={STEPS}")
    begun, *steps = rows
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    assert 0.3 < begun["eval/accuracy"] < 0.38
    assert steps[-1]["eval/accuracy"] > 0.48
    assert all(row["sync/bytes"] > 0 for row in steps[1:])


def test_megatron_and_vllm_split_alike_over_two_processes(tmp_path: Path) -> None:
    """What vLLM says of its tokens is what Megatron says of them, at every step."""
    rows, out = train(
        tmp_path / "run", *TASK, *RAY, "trainer.steps=5", "trainer.eval_every=0", "data.eval.size=32",
        "data.batch_prompts=16",
        "algorithm.old_log_probs=recompute", "actor.backend.name=megatron",
        "actor.backend.tensor_model_parallel_size=2", "rollout.tensor_parallel_size=2",
    )  # fmt: skip
    steps = [row for row in rows if row["step"]]
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5], out
    for row in steps:
        assert row["train/rollout_mismatch"] < 1e-5 and row["train/grad_norm"] > 0
    assert all(row["sync/bytes"] > 0 for row in steps[1:])


def test_colocated_and_disaggregated_take_the_same_steps(tmp_path: Path) -> None:
    """One process with both engines, and a process for each: the same samples, and so the same losses."""
    few = (*TASK, "trainer.steps=2", "trainer.eval_every=0", "data.eval.size=32", "data.batch_prompts=16",
           "algorithm.old_log_probs=recompute")  # fmt: skip
    apart = ("executor.name=ray", "executor.num_cpus=4", "hybrid_engine.name=disaggregated",
             "placement={pools: {train: [1], generate: [1]}, roles: {actor: train, rollout: generate}}")  # fmt: skip
    together, _ = train(tmp_path / "together", *few)
    separate, _ = train(tmp_path / "separate", *few, *apart)
    rows = [(one, other) for one, other in zip(together, separate, strict=True) if one["step"]]
    assert len(rows) == 2
    for one, other in rows:
        for name in ("train/reward", "train/loss", "train/grad_norm", "train/rollout_is_weight"):
            assert other[name] == pytest.approx(one[name], rel=1e-5, abs=1e-8), name
        assert other["train/rollout_mismatch"] < 1e-5
    assert max(abs(one["train/loss"]) for one, _ in rows) > 1e-4


def test_a_process_that_is_killed_while_it_generates(tmp_path: Path) -> None:
    """The run ends with one error that names the rank, and nothing stays."""
    marker, notes = f"test-marker-{os.getpid()}-vllm", tmp_path / "notes"
    notes.mkdir()
    words = [*TASK, *RAY, "rollout.name=marked", f"rollout.folder={notes}", "rollout.tensor_parallel_size=2",
             "rollout.max_response_tokens=50", "rollout.ignore_eos=true",
             f"trainer.run_dir={tmp_path / 'run'}"]  # fmt: skip
    env = environment(A_MARK_OF_THIS_TEST=marker, PYTHONPATH=install(Path(marked.__file__), tmp_path / "site"))
    process = subprocess.Popen([*MAIN, "train", *map(str, words)], env=env, text=True, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, start_new_session=True)  # fmt: skip
    while not (begun := sorted(notes.glob("1-*"))):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    os.kill(int(begun[0].name.split("-")[1]), signal.SIGKILL)
    out, _ = process.communicate(timeout=200)
    assert process.returncode == 1, out
    assert out.count("error:") == 1 and "rank 1 on" in out and "died" in out
    assert "generate_sequences" in out
    assert marked_processes(marker) == []
