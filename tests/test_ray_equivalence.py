"""Runs on several processes are the run on one: the same tokens, and the same numbers from the same tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import recorded
import tiny
import torch
from recorded import train
from safetensors.torch import load_file

from drivetrain.driver import checkpoints
from drivetrain.testing.processes import install

STEPS = 11
COMPARED = ("loss", "grad_norm", "critic_loss", "critic_grad_norm")


@pytest.mark.parametrize(
    "name, metrics, layouts",
    [
        ("grpo", 2, [(4, 1)]),
        ("ppo", 4, [(2, 1), (4, 2)]),  # the latter: two groups of two ranks that share their rows
    ],
)
def test_any_number_of_processes_trains_alike(
    tmp_path: Path, name: str, metrics: int, layouts: list[tuple[int, int]]
) -> None:
    """They draw the tokens of one process in the first step, and learn from its tokens what it does in all steps."""
    _, config = tiny.write_configs(tmp_path)
    (tmp_path / "score.py").write_text("def score(response):\n    return float(sum(map(ord, response)) % 7) / 7\n")
    pythonpath = install(Path(recorded.__file__), tmp_path / "site")
    common = [f"algorithm.name={name}", "hybrid_engine.name=colocated", "actor.mini_batch_prompts=6",
              f"trainer.steps={STEPS}", "rollout.name=recording",
              f"rewards=[{{name: function, path: '{tmp_path / 'score.py'}:score'}}]"]  # fmt: skip
    trace = tmp_path / "trace"
    trace.mkdir()
    one = train(config, pythonpath, tmp_path / "one", *common, f"rollout.folder={trace}")
    keys = [f"train/{key}" for key in COMPARED if f"train/{key}" in one[0]]
    assert len(keys) == metrics and min(row["train/grad_norm"] for row in one) > 0
    first = {seed: row["tokens"] for seed, row in recorded.first(trace, STEPS).items()}

    for processes, shared in layouts:
        drawn = tmp_path / f"drawn-{processes}"
        drawn.mkdir()
        many = train(config, pythonpath, tmp_path / f"all-{processes}", *common, "executor.name=ray",
                     f"executor.processes={processes}", "executor.num_cpus=4", f"rollout.folder={drawn}",
                     f"rollout.given={trace}", f"actor.backend.sequence_parallel={shared}")  # fmt: skip
        samples = recorded.read(drawn)
        assert len(list(drawn.iterdir())) == processes and len(samples) == len(recorded.read(trace))
        assert {seed: samples[seed]["tokens"] for seed in first} == first
        assert len(many) == len(one) == STEPS
        for alone, together in zip(one, many):
            for key in keys:
                assert together[key] == pytest.approx(alone[key], rel=1e-5, abs=1e-5), (alone["step"], key)


def test_the_quickstart_runs_on_two_processes(tmp_path: Path, drivetrain) -> None:
    """Its checkpoints, written in the background, are exported by one process."""
    (tmp_path / "examples").symlink_to(Path(__file__).parents[1] / "examples")
    done = drivetrain("train", "examples/quickstart/grpo.yaml", "executor.name=ray", "executor.processes=2",
                      "trainer.steps=3", "trainer.save_every=1", "trainer.save_in_background=true",
                      "trainer.run_dir=run", "data.eval=null", "trainer.eval_every=0")  # fmt: skip
    assert "placement: actor + rollout on 2 x " in done.stdout and "3 of 3 steps" in done.stdout
    kept = checkpoints.complete(tmp_path / "run")
    assert [folder.name for folder in kept] == ["step-000002", "step-000003"]
    assert len(list((kept[-1] / "actor").glob("rank-*.safetensors"))) == 2
    drivetrain("export", kept[-1], tmp_path / "model", "executor.name=local")
    whole = load_file(tmp_path / "model" / "model.safetensors")
    parts = [load_file(path) for path in sorted((kept[-1] / "actor").glob("rank-*.safetensors"))]
    assert all(tensor.equal(torch.cat([part[f"model.{name}"] for part in parts])) for name, tensor in whole.items())
