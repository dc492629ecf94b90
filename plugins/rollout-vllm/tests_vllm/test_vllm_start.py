"""How an engine starts, and with what it does not."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from rig_vllm import ATOL, Served, changed, furthest, make_engine, prompts, request

from drivetrain import RunError, UserError


def random_state() -> list[Any]:
    return [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]  # type: ignore[index]


@pytest.fixture(scope="session")
def reader(models: dict[str, Path], engines: dict[str, Served]) -> Any:
    """An engine that reads its weights, beside those that are sent them; and the random state before and after."""
    torch.manual_seed(11)
    random.seed(12)
    np.random.seed(13)
    before, place = random_state(), {name: os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    engine = make_engine(models["llama"], receives_weights=False, sample_seeds=False, max_model_tokens=64)
    after, left = random_state(), {name: os.environ.get(name) for name in place}
    yield engine, (before, after), (place, left)
    engine.close()
    assert dist.is_initialized(), "it made no process group, so it ends none"


def test_the_trainers_random_state_is_as_before(reader: Any) -> None:
    _, (before, after), (place, left) = reader
    assert before == after
    assert place == left


def test_weights_of_the_models_folder(reader: Any, models: dict[str, Path]) -> None:
    """And samples that share the engine's seed differ all the same."""
    engine, *_ = reader
    asked = [request(row, str(at), (1, 2, 3, 4), max_tokens=16) for at, row in enumerate(prompts(5))]
    got = engine.generate_batch(asked)
    assert furthest(changed(models["llama"], 0), asked, got) < ATOL
    assert all(len({c.token_ids for c in group}) > 1 for group in got)


def test_positions_can_be_fewer_than_the_models(reader: Any) -> None:
    engine, *_ = reader
    with pytest.raises(UserError, match=r"60 tokens and a response of up to 5 exceed the engine's 64 .*max_response"):
        engine.generate_batch([request([5] * 60, max_tokens=5)])


def test_an_engine_waits_for_weights_that_are_to_come(models: dict[str, Path]) -> None:
    from rig_vllm import context_of

    from drivetrain_rollout_vllm.config import VLLMRolloutConfig
    from drivetrain_rollout_vllm.engine import VLLMRollout

    engine = VLLMRollout(VLLMRolloutConfig(name="vllm", max_response_tokens=8), context_of(models["llama"]))
    with pytest.raises(RunError, match="cannot generate: it waits for its first weights"):
        engine.generate_batch([request([5])])
    engine.close()


@pytest.mark.parametrize("settings, message", [
    ({"engine_args": {"nonsense": 1}}, "vLLM refuses its settings: .*nonsense"),
    ({"max_model_tokens": 100_000}, "vLLM refuses its settings: .*100000"),
    ({"engine_args": {"block_size": -3}}, "vLLM refuses its settings"),
])  # fmt: skip
def test_settings_that_vllm_refuses(
    settings: dict[str, Any], message: str, models: dict[str, Path], engines: Any
) -> None:
    with pytest.raises(UserError, match=f"(?s){message}"):
        make_engine(models["llama"], **settings)


def test_processes_that_do_not_divide(models: dict[str, Path]) -> None:
    with pytest.raises(UserError, match="3 processes do not divide into engines of 2"):
        make_engine(models["llama"], world_size=3, tensor_parallel_size=2)
