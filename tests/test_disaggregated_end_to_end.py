"""Training and generation in worker groups of their own on Ray: the steps of a run that has both in one process."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import recorded
import tiny

from drivetrain import UserError, WorkerError
from drivetrain.config.resolve import load_config
from drivetrain.driver.session import Session
from drivetrain.metrics import to_floats
from drivetrain.seam.registry import get_registry, resolve

APART = ["executor.name=ray", "hybrid_engine.name=disaggregated"]
TWO_POOLS = "placement={{pools: {{train: [{0}], generate: [{1}]}}, roles: {{actor: train, rollout: generate}}}}"


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    from drivetrain_executor_ray import ray_init

    leave = ray_init(num_cpus=8)
    yield
    leave()


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    _, grpo = tiny.write_configs(tmp_path_factory.mktemp("apart"))
    return grpo


def session(config: Path, *overrides: str) -> Session:
    settings = ["data.batch_prompts=12", "actor.mini_batch_prompts=6", "data.eval=null", *overrides]
    return Session(load_config(config, settings, get_registry()).run)


def steps(session: Session, count: int = 3) -> list[tuple[Any, dict[str, float], dict[str, float]]]:
    """For each step: the batch, the metrics of learning, and those of the phases."""
    algorithm: Any = resolve("algorithms", session.run.algorithm.name)(session.run.algorithm)
    done = []
    assert session.train_prompts is not None
    for step in range(1, count + 1):
        session.progress.step = step
        batch = algorithm.collect(session.roles, session.train_prompts.next_batch(session.run.data.batch_prompts))
        learned = to_floats(algorithm.learn(session.roles, batch))
        done.append((batch, learned, session.phases.take()))
    return done


@pytest.fixture(scope="module")
def together(config: Path) -> list[tuple[Any, dict[str, float], dict[str, float]]]:
    """The steps of a run in one process, whose weights are sent."""
    with session(config, "hybrid_engine={name: colocated, sharing: never}") as one:
        return steps(one)


LAYOUTS = {
    "two pools": [TWO_POOLS.format(1, 1)],
    "sharded": [TWO_POOLS.format(2, 2)],
    "one pool": ["executor.processes=1", "executor.max_colocate_count=2"],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_steps_of_one_process(layout: str, config: Path, together: Any, cluster: None) -> None:
    with session(config, *APART, *LAYOUTS[layout]) as apart:
        assert apart.placement.endswith("; weights by gloo") and "; rollout on " in apart.placement
        found = steps(apart)
    for (batch, learned, phases), (same, expected, sent) in zip(found, together, strict=True):
        assert batch["responses"].equal(same["responses"])
        assert float((batch["rollout_log_probs"] - same["rollout_log_probs"]).abs().max()) < 1e-5
        for name in ("loss", "grad_norm"):
            assert learned[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
        assert phases["sync/bytes"] == sent["sync/bytes"] > 0 and phases["time/sync_s"] > 0
    assert not found[0][0]["responses"].equal(found[2][0]["responses"])
    assert found[2][1]["grad_norm"] > 0




def test_a_rollout_that_dies_ends_the_run(config: Path, cluster: None) -> None:
    with session(config, *APART, TWO_POOLS.format(1, 2)) as apart:
        steps(apart, 1)
        group: Any = apart.rollout
        os.kill(group.ranks[1].place.pid, signal.SIGKILL)
        with pytest.raises(WorkerError) as error:
            apart.phases.weights_changed()
            apart.progress.updates += 1
            steps(apart, 1)
    assert (error.value.role, error.value.rank, error.value.call) == ("rollout", 1, "enter_generation")
    assert f"process {group.ranks[1].place.pid} died" in str(error.value)
