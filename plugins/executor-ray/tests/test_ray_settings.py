"""The executor's section and the placement: what is refused before Ray is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from ray_rig import config_of

from drivetrain import ConfigError

RAY = "executor.name=ray"
APART = "hybrid_engine.name=disaggregated"


@pytest.mark.parametrize(
    "overrides, said",
    [
        (["placement.pools={all: [2]}"], "executor 'local' reads no placement"),
        ([RAY, "placement.pools={all: [2]}", "executor.processes=2"], "placement says how many processes there are"),
        ([RAY, "executor.address=auto", "executor.num_cpus=2"], "has its CPUs"),
        ([RAY, "executor.processes=2", "hybrid_engine.name=shared"], "the actor has 2 processes"),
        ([RAY, "placement={pools: {a: [2], b: [1]}}"], "which one is the actor's"),
        ([RAY, "placement={pools: {a: [2]}, roles: {actor: c}}"], "role actor is in pool 'c'; there are a"),
        ([RAY, "placement={pools: {a: [2], b: [1]}, roles: {actor: a}}"], "no role is in pool 'b'"),
        ([RAY, "placement={pools: {a: [2], b: [1]}, roles: {actor: a, ref: b}}"], "this run has no role ref"),
        ([RAY, "placement={pools: {a: [2], b: [1]}, roles: {actor: a, rollout: b}}"], "cannot be in another pool"),
        ([RAY, APART], "actor and rollout are processes of their own, and pool 'all' has room for one on each device"),
        ([APART], "needs executor.placement, which executor 'local' does not provide"),
        ([APART], "choose another executor (ray) or hybrid engine"),
        ([RAY, "placement={pools: {a: [2], b: [1]}, roles: {actor: a, rollout: b}}"], "hybrid engine (disaggregated)"),
        ([RAY, "placement={pools: {a: [0]}}"], "greater than 0"),
        ([RAY, "executor.proceses=2"], "unknown key 'proceses'"),
    ],
)
def test_refusals(folder: Path, overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        config_of(folder, *overrides)
    assert said in str(error.value)


def test_the_rollout_has_a_pool_of_its_own_or_room_in_the_actors(folder: Path) -> None:
    pools = "placement={pools: {a: [2], b: [1]}, roles: {actor: a, rollout: b}}"
    run = config_of(folder, RAY, APART, pools)
    assert run.placement is not None and run.placement.pool_of("rollout") == "b"
    config_of(folder, RAY, APART, "executor.max_colocate_count=2", "executor.processes=2")


def test_roles_follow_the_actor(folder: Path) -> None:
    run = config_of(folder, RAY, "placement={pools: {a: [2, 1], b: [1]}, roles: {actor: a, critic: b}}")
    assert run.placement is not None
    assert [run.placement.pool_of(role) for role in ("actor", "rollout", "ref", "critic")] == ["a", "a", "a", "b"]


def test_a_config_is_resolved_without_ray(folder: Path) -> None:
    config_of(folder)
    script = (
        "import sys; from drivetrain.config.resolve import load_config;"
        "from drivetrain.seam.registry import get_registry;"
        f"load_config(None, {_overrides(folder)!r}, get_registry());"
        "assert not {'ray', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def _overrides(folder: Path) -> list[str]:
    return [
        f"model.path={folder / 'model'}", "algorithm.name=ppo", "actor.backend.name=fsdp",
        "actor.optimizer={name: adamw, lr: 1.0e-2}", "rollout={name: hf, max_response_tokens: 3}",
        "hybrid_engine.name=colocated", "data.batch_prompts=1", RAY, "executor.processes=2",
        f"data.train={{name: jsonl, path: {folder}/prompts.jsonl}}", "rewards=[{name: exact_match}]",
        "trainer.steps=1",
    ]  # fmt: skip
