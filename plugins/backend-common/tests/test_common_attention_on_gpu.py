"""On a GPU: flash kernels in half precision beside PyTorch's fused attention in float32, whole and of parts."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from test_common_attention import LENGTHS, QUARTERS, by_parts, drawn

from drivetrain_backend_common.attention_kernels import KERNELS
from drivetrain_backend_common.flash import Varlen
from drivetrain_backend_common.sdpa import Sdpa

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("flash kernels run on CUDA", allow_module_level=True)
CUDA = torch.device("cuda")


@pytest.mark.parametrize("name", ["varlen", "flash_attention_2"])
@pytest.mark.parametrize("quarters", QUARTERS)
def test_parts_are_rows_of_the_whole(name: str, quarters: tuple[int, int]) -> None:
    if name == "flash_attention_2" and importlib.util.find_spec("flash_attn") is None:
        pytest.skip("flash-attn is not installed")
    tensors, others = drawn(CUDA, 64, torch.bfloat16), drawn(CUDA, 64)
    got, rows = by_parts(KERNELS[name], tensors, quarters)
    want = Sdpa(LENGTHS, CUDA)(*others, None, scaling=0.3, softcap=None)[rows]
    torch.testing.assert_close(got.float(), want, atol=0.05, rtol=0.02)
    slope = torch.randn(want.shape, generator=torch.Generator().manual_seed(1)).to(CUDA)
    got.backward(slope.bfloat16())
    want.backward(slope)
    for ours, theirs in zip(tensors, others, strict=True):
        assert ours.grad is not None and theirs.grad is not None
        a, b = ours.grad.float().flatten(), theirs.grad.flatten()
        assert float(torch.cosine_similarity(a, b, dim=0)) > 0.999


def test_varlen_suits_half_precision_alone() -> None:
    assert Varlen.suits(CUDA, torch.bfloat16, 64) and not Varlen.suits(CUDA, torch.float32, 64)
    assert not Varlen.suits(CUDA, torch.bfloat16, 12) and not Varlen.suits(torch.device("cpu"), torch.bfloat16, 64)
