"""What the distribution offers, and that offering it is cheap."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from drivetrain import PluginConfig, Problem, get_registry
from drivetrain_backend_fsdp.config import AdamWConfig, FSDPConfig, MuonConfig


def test_offers_are_cheap() -> None:
    code = (
        "import sys; from drivetrain_backend_fsdp import plugin, config;"
        " names = [s.name for s in (*plugin.drivetrain_backends(), *plugin.drivetrain_optimizers())];"
        " assert names == ['fsdp', 'adamw', 'muon'];"
        " assert not {'torch', 'transformers', 'safetensors'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_options_are_checked() -> None:
    assert FSDPConfig().name == "fsdp" and AdamWConfig(lr=1e-3).name == "adamw"
    for model, options in (
        (FSDPConfig, {"micro_batch_tokens": 0}),
        (FSDPConfig, {"unknown": 1}),
        (AdamWConfig, {}),
        (FSDPConfig, {"max_skipped_steps": -1}),
        (AdamWConfig, {"lr": 1e-3, "betas": (0.9, 1.0)}),
        (AdamWConfig, {"lr": 1e-3, "momentum": 0.9}),
        (MuonConfig, {"lr": 1e-3, "momentum": 1.0}),
        (MuonConfig, {"lr": 1e-3, "ns_steps": 0}),
        (MuonConfig, {"lr": 1e-3, "adjust_lr": "none"}),
    ):
        with pytest.raises(ValidationError):
            model(**options)


def problems(section: FSDPConfig, *, hybrid_engine: str = "shared", actor: bool = True) -> list[Problem]:
    run: Any = SimpleNamespace(
        actor=SimpleNamespace(backend=section if actor else FSDPConfig()), critic=None, reward_model=None,
        rollout="any",
        hybrid_engine=PluginConfig(name=hybrid_engine),
    )  # fmt: skip
    return list(section.check(run, get_registry()))


def test_one_kind_of_offload_at_a_time() -> None:
    assert not problems(FSDPConfig(cpu_offload=True, activation_offload=True, gradient_checkpointing=True))
    for key in ("param_offload", "grad_offload", "optimizer_offload"):
        found = problems(FSDPConfig(cpu_offload=True, **{key: True}), actor=False)
        assert [problem.key for problem in found] == [key]
        assert "in host memory all the time" in found[0].what


def test_parameters_stay_where_the_rollout_generates_with_them() -> None:
    section = FSDPConfig(param_offload=True, optimizer_offload=True)
    [problem] = problems(section)
    assert problem.key == "param_offload" and "'shared' generates with the trainer's module" in problem.what
    assert "sharing: never" in problem.mend
    assert not problems(section, actor=False)  # a reference or a critic
    assert not problems(FSDPConfig(grad_offload=True, optimizer_offload=True))
    run: Any = SimpleNamespace(actor=SimpleNamespace(backend=section), critic=None, reward_model=None, rollout=None)
    assert not list(section.check(run, get_registry()))
