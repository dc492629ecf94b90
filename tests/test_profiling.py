"""Chosen steps of a run are profiled on chosen ranks: their files, and the calls that these name."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

from drivetrain import UserError
from drivetrain.cli import main
from drivetrain.cli.train import train

CALLS = {
    "actor_rollout.enter_generation", "actor_rollout.generate_sequences", "actor_rollout.enter_training",
    "critic.compute_values", "actor_rollout.update_actor", "critic.update_critic", "actor_rollout.save_checkpoint",
    "critic.save_checkpoint",
}  # fmt: skip
PHASES = {"generate", "values", "update", "update_critic", "save"}


def run(folder: Path, *settings: str) -> Path:
    """Train three steps of PPO in this process; returns the run folder."""
    _, config = tiny.write_configs(folder)
    common = ["algorithm.name=ppo", "trainer.steps=3", "trainer.save_every=1", "data.eval=null", "hardware.name=cpu"]
    assert train(config, [*common, f"trainer.run_dir={folder / 'run'}", *settings], resume=None, overwrite=False) == 0
    return folder / "run"


def ranges(file: Path) -> set[str]:
    """Names of the ranges of a trace."""
    with gzip.open(file, "rt") as text:
        events = json.load(text)["traceEvents"]
    return {event["name"] for event in events if event.get("cat") == "user_annotation"}


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_trace_of_a_chosen_step_names_its_calls(tmp_path: Path) -> None:
    folder = run(tmp_path, "profiler={steps: [1, 3]}") / "profile"
    assert files(folder) == [f"step-{step}-rank-0.{kind}" for step in (1, 3) for kind in ("json.gz", "txt")]
    for step in (1, 3):
        assert not (CALLS | PHASES) - ranges(folder / f"step-{step}-rank-0.json.gz")
        assert "actor_rollout.update_actor" in (folder / f"step-{step}-rank-0.txt").read_text()


def test_calls_from_a_thread_are_in_the_trace(tmp_path: Path) -> None:
    tiny.write_judge(tmp_path / "judge")
    judged = f"reward_model={{model: {{path: '{tmp_path / 'judge'}'}}, label_index: 1}}"
    folder = run(tmp_path, "profiler={steps: [2], folder: traces}", judged) / "traces"
    assert {"reward.compute_rm_score", "reward"} <= ranges(folder / "step-2-rank-0.json.gz")


def test_a_step_that_fails_leaves_what_it_did(tmp_path: Path) -> None:
    (tmp_path / "score.py").write_text("def score(response):\n    raise RuntimeError('no score')\n")
    with pytest.raises(Exception, match="no score"):
        run(tmp_path, "profiler={steps: [1]}", f"rewards=[{{name: function, path: '{tmp_path / 'score.py'}:score'}}]")
    found = ranges(tmp_path / "run" / "profile" / "step-1-rank-0.json.gz")
    assert "actor_rollout.generate_sequences" in found and "actor_rollout.update_actor" not in found


def test_a_run_without_the_section_has_no_profile(tmp_path: Path) -> None:
    assert not (run(tmp_path, "trainer.steps=1") / "profile").exists()


@pytest.mark.parametrize(
    ("section", "why"),
    [
        ("{steps: [2, 4]}", r"there is no step 4; the run has 3 \(command line: profiler.steps\)"),
        ("{steps: []}", "at least 1 item"),
        ("{steps: [1], ranks: [1]}", r"there is no rank 1 \(profiler.ranks\)"),
        ("{steps: [1], tool: nsys}", r"a cpu has no vendor's profiler \(profiler.tool\)"),
        ("{steps: [1], tool: memory}", r"torch keeps no history of a cpu's memory \(profiler.tool\)"),
        ("{steps: [1], tool: nsight}", "input should be 'torch', 'nsys' or 'memory'"),
    ],
)
def test_what_cannot_be_profiled_is_refused(tmp_path: Path, section: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        run(tmp_path, f"profiler={section}")
    assert not (tmp_path / "run" / "profile").exists()


def test_an_export_asks_nothing_of_the_section(tmp_path: Path) -> None:
    """It may run on other hardware and fewer ranks than what it exports."""
    folder = run(tmp_path, "trainer.steps=1", "profiler={steps: [1]}")
    elsewhere = "profiler={steps: [1], tool: nsys, ranks: [5]}"
    assert main.run(["export", str(folder), str(tmp_path / "exported"), elsewhere]) == 0
    assert (tmp_path / "exported" / "config.json").exists()


def test_ranks_of_worker_groups_on_several_processes(tmp_path: Path) -> None:
    _, config = tiny.write_configs(tmp_path)
    command = [
        sys.executable, "-c", "from drivetrain.cli.main import main; main()", "train", str(config),
        "algorithm.name=ppo", "trainer.steps=2", "data.eval=null", "executor.name=ray", "executor.num_cpus=4",
        "hybrid_engine.name=colocated", "placement={pools: {a: [2], b: [1]}, roles: {actor: a, critic: b}}",
        f"trainer.run_dir={tmp_path / 'run'}", "profiler={steps: [2], ranks: [0]}",
    ]  # fmt: skip
    done = subprocess.run(command, env={**os.environ}, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "run" / "profile"
    assert files(folder) == [f"step-2-{name}rank-0.{kind}" for name in ("critic-", "") for kind in ("json.gz", "txt")]
    policy, critic = ranges(folder / "step-2-rank-0.json.gz"), ranges(folder / "step-2-critic-rank-0.json.gz")
    assert not {name for name in CALLS if "actor" in name} - policy
    assert not {name for name in CALLS if "critic" in name} - critic and not any("actor" in name for name in critic)
