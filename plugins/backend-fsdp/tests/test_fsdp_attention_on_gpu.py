"""On a device: kernels of attention, selective recomputation and compiled layers beside sdpa in float32."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import fsdp_rig as rig
import pytest
import torch
from transformers import Qwen2Config

from drivetrain_backend_fsdp.backend import FSDPBackend

pytestmark = pytest.mark.gpu
pytest.importorskip("drivetrain_hardware_cuda")
ROWS = 60  # several blocks of 128 tokens
BFLOAT16 = {"model": {"dtype": "float32"}, "compute_dtype": "bfloat16"}


@pytest.fixture(scope="module", params=["qwen3", "gemma3", "gemma2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of models with heads of 16; all but the first have windows that sequences are longer than."""
    return rig.write_model(request.param, tmp_path_factory.mktemp(request.param), hidden_size=64, head_dim=16)


def made(folder: Path, **options: Any) -> FSDPBackend:
    return rig.backend(folder, hardware="cuda", max_grad_norm=None, **options)


def gradients(folder: Path, **options: Any) -> tuple[float, dict[str, torch.Tensor]]:
    return rig.gradients(made(folder, **options), rig.batch(ROWS))


def assert_alike(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    """As rounding to bfloat16 leaves them: in the same direction, and as long to 5 %."""
    ours, theirs = (torch.cat([tensors[name].flatten() for name in want]) for tensors in (got, want))
    assert float(torch.cosine_similarity(ours, theirs, dim=0)) > 0.99
    assert float(ours.norm() / theirs.norm()) == pytest.approx(1, abs=0.05)


def test_flex_equals_sdpa(folder: Path) -> None:
    loss, want = gradients(folder)
    for budget, recompute in ((None, False), (300, "full"), (200, False)):
        got_loss, got = gradients(folder, attention="flex", gradient_checkpointing=recompute, micro_batch_tokens=budget)
        assert got_loss == pytest.approx(loss, rel=1e-4)
        rig.assert_close(got, want, 1e-4)


@pytest.mark.parametrize("kernel", ["sdpa", "flex", "varlen", "flash_attention_2"])
def test_half_precision_is_close_to_sdpa_in_float32(folder: Path, kernel: str) -> None:
    if kernel == "flash_attention_2" and importlib.util.find_spec("flash_attn") is None:
        pytest.skip("flash-attn is not installed")
    if kernel == "varlen" and "gemma2" in folder.name:
        pytest.skip("varlen does not compute soft-capped attention")
    loss, want = gradients(folder)
    got_loss, got = gradients(folder, attention=kernel, **BFLOAT16)
    assert got_loss == pytest.approx(loss, abs=0.02)
    assert_alike(got, want)


def test_compiled_layers_equal_plain_ones(tmp_path: Path) -> None:
    folder = rig.write_model("qwen3", tmp_path, hidden_size=64)
    loss, want = gradients(folder)
    for budget, recompute in ((None, False), (300, "full"), (200, False)):
        got_loss, got = gradients(folder, compile=True, gradient_checkpointing=recompute, micro_batch_tokens=budget)
        assert got_loss == pytest.approx(loss, rel=1e-4)
        rig.assert_close(got, want, 1e-4)


@pytest.fixture(scope="module")
def middle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a model whose activations are large beside its weights; without weights."""
    folder = tmp_path_factory.mktemp("middle")
    shape = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 12}
    config = Qwen2Config(**rig.SMALL | shape | {"initializer_range": 0.02})
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(folder)
    rig.tokenizer(folder)
    return folder


@pytest.mark.parametrize("kernel", ["sdpa", "varlen"])
def test_selective_keeps_less_than_all_and_more_than_inputs(middle: Path, kernel: str) -> None:
    peaks, seen = [], []
    for recompute in (False, "selective", "full"):
        backend = made(middle, attention=kernel, gradient_checkpointing=recompute,
                       model={"init": "random", "dtype": "bfloat16"})  # fmt: skip
        data, hardware = rig.batch(2000), backend.context.hardware
        rig.gradients(backend, data)
        hardware.reset_peak()
        before = hardware.memory().allocated
        seen.append(rig.gradients(backend, data))
        peaks.append(hardware.memory().peak - before)
        del backend
    assert peaks[0] > 1.3 * peaks[1] and peaks[1] > 1.3 * peaks[2]
    for loss, got in seen[1:]:
        assert loss == pytest.approx(seen[0][0], abs=1e-3)
        assert_alike({n: t.float() for n, t in got.items()}, {n: t.float() for n, t in seen[0][1].items()})


def test_kernels_and_compiled_layers_work_together(middle: Path) -> None:
    options = {"model": {"init": "random", "dtype": "bfloat16"}}
    loss, want = gradients(middle, **options)
    for chosen in ({"attention": "varlen"}, {"attention": "flex"},
                   {"attention": "varlen", "gradient_checkpointing": "full"}):  # fmt: skip
        got_loss, got = gradients(middle, **options, **chosen, compile=True)
        assert got_loss == pytest.approx(loss, abs=0.02)
        assert_alike({n: t.float() for n, t in got.items()}, {n: t.float() for n, t in want.items()})
