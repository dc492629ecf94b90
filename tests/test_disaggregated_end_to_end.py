"""Training and generation in worker groups of their own on Ray: the steps of a run that has both in one process."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny

from drivetrain import WorkerError
from drivetrain.config.resolve import load_config
from drivetrain.driver.session import Session
from drivetrain.metrics import to_floats
from drivetrain.seam.registry import get_registry, resolve

APART = ["executor.name=ray", "hybrid_engine.name=disaggregated"]
STEPS = 3


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    from drivetrain_executor_ray import ray_init

    leave = ray_init(num_cpus=8)
    yield
    leave()


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("apart")
    (folder / "score.py").write_text("def score(response):\n    return float(sum(map(ord, response)) % 7) / 7\n")
    _, grpo = tiny.write_configs(folder)
    return grpo


def session(config: Path, *overrides: str) -> Session:
    settings = ["data.batch_prompts=12", "actor.mini_batch_prompts=6", "data.eval=null",
                f"rewards=[{{name: function, path: '{config.parent / 'score.py'}:score'}}]", *overrides]  # fmt: skip
    return Session(load_config(config, settings, get_registry()).run)


def steps(session: Session, count: int = STEPS) -> list[tuple[Any, dict[str, float], dict[str, float]]]:
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


def same_steps(found: Any, expected: Any) -> None:
    """Tokens are equal; what follows from them differs by rounding."""
    for (batch, learned, phases), (other_batch, other, other_phases) in zip(found, expected, strict=True):
        assert batch["responses"].equal(other_batch["responses"])
        assert float((batch["rollout_log_probs"] - other_batch["rollout_log_probs"]).abs().max()) < 1e-5
        for name in ("loss", "grad_norm"):
            assert learned[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6), name
        assert learned["grad_norm"] > 0
        assert phases["sync/bytes"] == other_phases["sync/bytes"] > 0


def test_two_pools_of_two_processes(config: Path, together: Any, cluster: None) -> None:
    """The model is sharded over the ranks that train, and whole on each of those that generate."""
    pools = "{pools: {train: [2], generate: [2]}, roles: {actor: train, rollout: generate}}"
    with session(config, *APART, f"placement={pools}") as apart:
        assert apart.placement.endswith("; weights by gloo") and "; rollout on 2 x cpu" in apart.placement
        same_steps(steps(apart), together)


def test_one_pool_whose_devices_are_shared(config: Path, together: Any, cluster: None, tmp_path: Path) -> None:
    """Also, weights that are loaded are sent; and a rollout that dies ends the run."""
    with session(config, *APART, "executor.max_colocate_count=2") as apart:
        rollout, prompts = apart.roles.rollout, apart.train_prompts
        assert rollout is not None and prompts is not None
        same_steps(steps(apart), together)
        asked, updates = prompts.next_batch(12), apart.progress.updates
        apart.save_models(tmp_path)
        at_checkpoint = rollout.generate(asked)["rollout_log_probs"]
        steps(apart, 1)
        assert not rollout.generate(asked)["rollout_log_probs"].equal(at_checkpoint)
        apart.load_models(tmp_path)
        apart.progress.updates = updates
        apart.progress.step = STEPS
        assert rollout.generate(asked)["rollout_log_probs"].equal(at_checkpoint)

        steps(apart, 1)  # ends in training, so that the next generation has to have new weights
        (rank,) = apart.rollout.ranks  # type: ignore[attr-defined]
        os.kill(rank.place.pid, signal.SIGKILL)
        with pytest.raises(WorkerError) as error:
            rollout.generate(asked)
    assert (error.value.role, error.value.rank, error.value.call) == ("rollout", 0, "enter_generation")
    assert f"process {rank.place.pid} died" in str(error.value)
