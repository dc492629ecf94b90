"""verl's keys of engines, word for word on the command line, are ours: the same value, origin and refusals."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tiny

from drivetrain import ConfigError, load_config
from drivetrain.config.resolve import Resolved
from drivetrain.seam.discovery import scan
from drivetrain.seam.registry import Registry

Load = Callable[..., Resolved]

MEGATRON = {
    "param_offload": True, "grad_offload": True, "optimizer_offload": True, "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 4, "virtual_pipeline_model_parallel_size": 2, "context_parallel_size": 2,
    "expert_model_parallel_size": 8, "expert_tensor_parallel_size": 1, "sequence_parallel": True,
    "use_distributed_optimizer": False,
}  # fmt: skip
FSDP = {"param_offload": True, "grad_offload": True, "optimizer_offload": True, "reshard_after_forward": False}
SECTIONS = {"actor": "actor_rollout_ref.actor.megatron", "ref": "actor_rollout_ref.ref.megatron",
            "critic": "critic.megatron"}  # fmt: skip
FSDP_SECTIONS = {"actor": "actor_rollout_ref.actor.fsdp_config", "ref": "actor_rollout_ref.ref.fsdp_config",
                 "critic": "critic.model.fsdp_config"}  # fmt: skip
STAND_IN = """
from drivetrain import BackendSpec, hookimpl
from drivetrain_backend_megatron.config import MegatronConfig

class Config(MegatronConfig):
    def check(self, run, registry):
        return ()  # the model is too small for such sizes

@hookimpl
def drivetrain_backends():
    yield BackendSpec(name="stand_in", summary="", factory="none:none", config="stand_in:Config", provides=(
        "backend.train", "backend.log_probs", "backend.values", "backend.live_module", "backend.weights",
        "backend.param_offload", "backend.grad_offload", "backend.optimizer_offload"))
"""


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """Resolve a run of PPO with a reference, where a backend ``stand_in`` has the options of ``megatron``."""
    _, config = tiny.write_configs(tmp_path)
    info = tmp_path / "site" / "stand_in-1.0.dist-info"
    info.mkdir(parents=True)
    (tmp_path / "site" / "stand_in.py").write_text(STAND_IN)
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: stand-in\nVersion: 1.0\nRequires-Dist: drivetrain-core\n"
    )
    (info / "entry_points.txt").write_text("[drivetrain]\nstand_in = stand_in\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    registry = Registry(scan(sys.path))
    common = ["algorithm.name=ppo", "algorithm.kl_coef=0.1"]
    yield lambda *words: load_config(config, [*common, *words], registry)
    sys.modules.pop("stand_in", None)


@pytest.mark.parametrize(("role", "section"), SECTIONS.items())
def test_sections_of_megatron(load: Load, role: str, section: str) -> None:
    words = [f"{section}.{key}={value}" for key, value in MEGATRON.items()]
    resolved = load("actor.backend.name=stand_in", *words)
    backend = getattr(resolved.run, role).backend
    assert {key: getattr(backend, key) for key in MEGATRON} == MEGATRON
    assert {resolved.origin(f"{role}.backend.{key}") for key in MEGATRON} == {"command line"}


def test_offload_and_sizes_of_the_backend_itself(load: Load) -> None:
    """A reference and a critic are as parallel as the actor, and offload what they are told to."""
    chosen = {"param_offload": True, "grad_offload": True, "optimizer_offload": True}
    actor, ref, critic = SECTIONS["actor"], SECTIONS["ref"], SECTIONS["critic"]
    run = load("hybrid_engine.name=colocated", "actor.backend.name=megatron", f"{actor}.tensor_model_parallel_size=2",
               *(f"{section}.{key}=True" for section in (actor, critic) for key in chosen),
               f"{ref}.param_offload=True").run  # fmt: skip
    for role, keys in (("actor", chosen), ("critic", chosen), ("ref", {"param_offload": True})):
        backend = getattr(run, role).backend
        assert backend.name == "megatron" and backend.tensor_model_parallel_size == 2
        assert {key: getattr(backend, key) for key in keys} == keys


@pytest.mark.parametrize(("role", "section"), FSDP_SECTIONS.items())
def test_sections_of_fsdp(load: Load, role: str, section: str) -> None:
    words = [f"{section}.{key}={value}" for key, value in FSDP.items()]
    resolved = load("hybrid_engine={name: colocated, sharing: never}", *words)
    backend = getattr(resolved.run, role).backend
    assert {key: getattr(backend, key) for key in FSDP} == FSDP
    assert {resolved.origin(f"{role}.backend.{key}") for key in FSDP} == {"command line"}
    assert getattr(load(f"{section}.offload_policy=True").run, role).backend.cpu_offload is True


@pytest.mark.parametrize(
    ("engine", "words"), [("stand_in", section) for section in SECTIONS.values()]
    + [("fsdp", section) for section in FSDP_SECTIONS.values()]
)  # fmt: skip
def test_a_misspelt_key_is_told_the_right_one(load: Load, engine: str, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load(f"actor.backend.name={engine}", f"{words}.param_ofload=True")
    told = str(raised.value)
    assert "unknown key 'param_ofload' (command line: " in told and "did you mean param_offload?" in told
