"""What is offered, which settings are refused, and what is said where vLLM is not installed."""

from __future__ import annotations

import importlib
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from drivetrain import ModelConfig, PluginConfig, RolloutContext, RolloutEngine, RolloutSpec, UserError, resolve
from drivetrain.seam.registry import get_registry
from drivetrain_rollout_vllm.config import SET_HERE, VLLMRolloutConfig
from drivetrain_rollout_vllm.plugin import drivetrain_rollouts


def config(**settings: Any) -> VLLMRolloutConfig:
    return VLLMRolloutConfig(name="vllm", max_response_tokens=8, **settings)


def context(*, rank: int = 0, world_size: int = 1) -> RolloutContext:
    hardware = resolve("hardware", "cpu")(PluginConfig(name="cpu"))
    model = ModelConfig(path=Path("nowhere"))
    return RolloutContext(model=model, hardware=hardware, rank=rank, world_size=world_size, seed=1)


def test_spec() -> None:
    (spec,) = drivetrain_rollouts()
    assert isinstance(spec, RolloutSpec) and spec.name == "vllm"
    for target, base in ((spec.factory, RolloutEngine), (spec.config or "", VLLMRolloutConfig)):
        module, _, attribute = target.partition(":")
        assert issubclass(getattr(importlib.import_module(module), attribute), base)
    assert "rollout.live_module" not in spec.provides, "it has weights of its own"


def test_plugin_and_config_import_no_engine() -> None:
    code = (
        "import sys, drivetrain_rollout_vllm.plugin as plugin, drivetrain_rollout_vllm.config\n"
        "list(plugin.drivetrain_rollouts())\n"
        "assert not {'torch', 'transformers', 'vllm'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("settings", [
    {"tensor_parallel_size": 0}, {"gpu_memory_utilization": 1.1}, {"gpu_memory_utilization": 0}, {"sleep_level": 3},
    {"dtype": "int8"}, {"max_sequences": 0}, {"tensor_parallel": 2},
])  # fmt: skip
def test_values_that_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        config(**settings)


@pytest.mark.parametrize("key", sorted(SET_HERE))
def test_arguments_that_follow_from_other_settings(key: str) -> None:
    with pytest.raises(ValidationError, match=f"engine_args.{key} follows from other settings of the run"):
        config(engine_args={"block_size": 16, key: None})


@pytest.mark.parametrize("processes, size, problem", [
    (None, 1, None), (4, 1, None), (4, 2, None), (4, 4, None),
    (None, 2, "this run has one process"),
    (4, 3, r"4 processes do not divide into engines of 3 \(4 = 1 x 3 \+ 1\)"),
    (2, 4, r"2 processes do not divide into engines of 4 \(2 = 0 x 4 \+ 2\)"),
])  # fmt: skip
def test_processes_have_to_divide(processes: int | None, size: int, problem: str | None) -> None:
    run: Any = SimpleNamespace(processes_of=lambda role: {"rollout": processes}[role], rollout=None)
    found = list(config(tensor_parallel_size=size).check(run, get_registry()))
    assert len(found) == (problem is not None)
    if problem:
        import re

        assert found[0].key == "tensor_parallel_size" and re.search(problem, found[0].what)


@pytest.mark.parametrize("needs, settings, problem", [
    ((), {}, None),
    (("rollout.adapter",), {"adapter_rank": 8, "sleep_level": 1}, None),
    (("rollout.adapter",), {}, "vLLM has to make room"),
    ((), {"adapter_rank": 8, "sleep_level": 0}, "the hybrid engine sends all weights"),
])  # fmt: skip
def test_room_for_an_adapter_is_made_if_one_is_sent(needs: Any, settings: dict[str, Any], problem: str | None) -> None:
    own = config(**settings)
    hybrid = SimpleNamespace(required_capabilities=lambda: needs)
    run: Any = SimpleNamespace(processes_of=lambda role: 1, rollout=own, hybrid_engine=hybrid)
    found = list(own.check(run, get_registry()))
    assert [one.key for one in found] == ["adapter_rank"] * (problem is not None)
    assert problem is None or problem in found[0].what
    run.rollout = config()
    assert not list(own.check(run, get_registry())), "one that judges is sent nothing"


def test_the_base_of_an_adapter_may_not_be_dropped() -> None:
    with pytest.raises(ValidationError, match="sleep_level=2 drops the weights"):
        config(adapter_rank=8)


@pytest.mark.parametrize("rank, size", [(1, 8), (8, 8), (9, 16), (300, 320), (512, 512)])
def test_room_of_an_adapter(rank: int, size: int) -> None:
    from drivetrain_rollout_vllm.adapters import room

    assert room(rank) == size


def test_ranks_of_an_engine_stand_side_by_side() -> None:
    engine = importlib.import_module("drivetrain_rollout_vllm.engine").VLLMRollout
    places = [engine(config(tensor_parallel_size=2), context(rank=rank, world_size=4)).layout for rank in range(4)]
    assert [(place.dp, place.tp) for place in places] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert {(place.dp_size, place.tp_size) for place in places} == {(2, 2)}


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed here")
def test_without_vllm_there_is_one_error() -> None:
    engine = importlib.import_module("drivetrain_rollout_vllm.engine").VLLMRollout(config(), context())
    with pytest.raises(UserError, match="vLLM is not installed") as raised:
        engine.initialize()
    assert "pip install 'drivetrain-rollout-vllm[cuda]'" in str(raised.value)
    assert "drivetrain-rollout-vllm[cpu]" in str(raised.value)
    engine.close()
