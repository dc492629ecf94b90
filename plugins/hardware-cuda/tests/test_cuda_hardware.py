"""What can be said of ``cuda`` on a machine without a GPU. With one, ``hardware.name=cuda`` runs the rest."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from drivetrain import PluginConfig, UserError
from drivetrain.seam.registry import get_registry
from drivetrain_hardware_cuda.cuda import CUDA


def test_it_is_offered_without_torch() -> None:
    code = (
        "import sys; from drivetrain.seam.registry import get_registry;"
        "assert 'cuda' in get_registry().names('hardware'); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_run_without_a_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert CUDA.detect() == 0
    with pytest.raises(UserError, match="no CUDA device"):
        CUDA(PluginConfig(name="cuda"))


def test_a_rocm_build_is_not_taken_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert CUDA.detect() == 0


def test_it_answers_the_whole_contract() -> None:
    assert not CUDA.__abstractmethods__
    assert get_registry().load("hardware", "cuda") is CUDA
    assert (CUDA.communication_backend, CUDA.ray_resource) == ("nccl", "GPU")
