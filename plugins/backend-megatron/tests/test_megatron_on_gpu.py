"""On a GPU: log-probabilities and updates beside transformers in float32 on the CPU."""

from __future__ import annotations

from pathlib import Path

import megatron_learning as learning
import megatron_rig as rig
import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("groups_go")]
pytest.importorskip("drivetrain_hardware_cuda")


@pytest.fixture(scope="module", params=["tied", "mixtral"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With heads of 16, the least that flex takes."""
    return rig.write_model(request.param, tmp_path_factory.mktemp(request.param), hidden_size=64)


@pytest.mark.parametrize("attention", ["sdpa", "flex"])
def test_float32_equals_transformers(folder: Path, attention: str) -> None:
    wanted = learning.expected(folder)
    made = learning.backend(folder, hardware="cuda", attention=attention)
    found = made.forward(learning.batch(), ("log_probs", "entropy"), temperature=learning.TEMPERATURE)
    for name, values in found.items():
        torch.testing.assert_close(values.cpu(), getattr(wanted, name), atol=2e-3, rtol=1e-3)
    for step in range(learning.STEPS):
        loss, norm = learning.update(made, step)
        assert loss == pytest.approx(wanted.losses[step], abs=1e-3)
        assert norm == pytest.approx(wanted.norms[step], rel=1e-2)


@pytest.mark.parametrize("attention", [None, "sdpa", "flex", "varlen"])
def test_bfloat16_is_close_to_float32(folder: Path, attention: str | None) -> None:
    wanted = learning.expected(folder)
    made = learning.backend(folder, hardware="cuda", attention=attention, model={"dtype": "bfloat16"})
    found = made.forward(learning.batch(), ("log_probs",), temperature=learning.TEMPERATURE)["log_probs"]
    assert 0 < float((found.cpu() - wanted.log_probs).abs().mean()) < 0.05
    for step in range(learning.STEPS):
        loss, norm = learning.update(made, step)
        assert loss == pytest.approx(wanted.losses[step], abs=0.05)
        assert norm == pytest.approx(wanted.norms[step], rel=0.1)
