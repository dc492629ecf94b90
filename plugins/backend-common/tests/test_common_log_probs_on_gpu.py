"""On a GPU: both kernels beside float64. With TRITON_INTERPRET=1, Triton's interpreter runs them on a CPU too."""

from __future__ import annotations

import os
from itertools import product
from typing import Any

import pytest
import torch
from test_common_log_probs import TEMPERATURE, assert_near, plain
from torch import Tensor

from drivetrain_backend_common.log_probs import Head, token_log_probs
from drivetrain_backend_common.logit_kernels import Chunked, LogitKernel, logit_kernel

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")
ON_GPU = torch.cuda.is_available()
if not ON_GPU and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton compiles for a GPU", allow_module_level=True)

from drivetrain_backend_common.triton_kernel import BLOCK, Triton

DEVICE = torch.device("cuda" if ON_GPU else "cpu")
TOKENS, HIDDEN = 21, 40
VOCABULARIES = (17, BLOCK, 2 * BLOCK + 809)
CHUNKS = (1, 8, 21, 64)
EXACT, ROUNDED = 2e-5, 3e-2


def leaves(vocabulary: int, dtype: torch.dtype, tokens: int = TOKENS) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, bias and targets, the first and last token of the vocabulary among these."""
    random = torch.Generator().manual_seed(0)

    def drawn(*shape: int, size: float = 1.0) -> Tensor:
        return (size * torch.randn(shape, generator=random)).to(DEVICE, dtype).requires_grad_()

    targets = torch.randint(vocabulary, (tokens,), generator=random)
    targets[0], targets[-1] = 0, vocabulary - 1
    return drawn(tokens, HIDDEN), drawn(vocabulary, HIDDEN, size=0.5), drawn(vocabulary), targets.to(DEVICE)


def computed(
    kernel: type[LogitKernel], hidden: Tensor, targets: Tensor, head: Head, *, chunk: int = 8, entropy: bool = True
) -> tuple[Tensor, Tensor | None]:
    return token_log_probs(
        hidden, targets, head, temperature=TEMPERATURE, chunk_tokens=chunk, entropy=entropy, kernel=kernel
    )


def loss(outputs: tuple[Tensor, Tensor | None], used: str) -> Tensor:
    slopes = torch.linspace(-1, 2, len(outputs[0]), dtype=torch.float64, device=DEVICE)
    parts = {"log_probs": outputs[0], "entropy": outputs[1]}
    return sum((parts[name].double() * slopes.roll(len(name))).sum() for name in used.split("+"))  # type: ignore


@pytest.mark.parametrize("kernel", [Chunked, Triton])
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("used", ["log_probs", "entropy", "log_probs+entropy"])
@pytest.mark.parametrize(("bias", "scale", "softcap"), [(False, 1.0, None), (True, 0.3, None), (True, 0.3, 2.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_and_gradients_equal_float64(
    kernel: type[LogitKernel], vocabulary: int, used: str, bias: bool, scale: float, softcap: float | None,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    hidden, weight, offset, targets = leaves(vocabulary, dtype)
    head = Head(weight=weight, bias=offset if bias else None, scale=scale, softcap=softcap)
    learnt = [hidden, weight, offset] if bias else [hidden, weight]
    outputs, want = computed(kernel, hidden, targets, head, entropy="entropy" in used), plain(hidden, targets, head)
    exact = dtype == torch.float32 or (ON_GPU and torch.version.hip is None)  # products are float32 there
    limit = EXACT if exact else ROUNDED
    assert_near([part for part in outputs if part is not None], want[: 1 + ("entropy" in used)], limit)
    got = torch.autograd.grad(loss(outputs, used), learnt)
    assert [grad.dtype for grad in got] == [dtype] * len(learnt)
    limit = EXACT if dtype == torch.float32 else ROUNDED
    assert_near(got, torch.autograd.grad(loss(want, used), learnt), limit)


@pytest.mark.parametrize(("chunk", "entropy"), product(CHUNKS, (False, True)))
def test_chunks_do_not_change_the_result(chunk: int, entropy: bool) -> None:
    hidden, weight, bias, targets = leaves(809, torch.float32)
    head, used = Head(weight=weight, bias=bias), "log_probs+entropy" if entropy else "log_probs"
    outputs = computed(Triton, hidden, targets, head, chunk=chunk, entropy=entropy)
    whole = computed(Chunked, hidden, targets, head, chunk=TOKENS, entropy=entropy)
    assert_near([part for part in outputs if part is not None], [part for part in whole if part is not None], EXACT)
    first = torch.autograd.grad(loss(outputs, used), (hidden, weight, bias), retain_graph=True)
    second = torch.autograd.grad(loss(outputs, used), (hidden, weight, bias))  # now without a kept chunk
    want = torch.autograd.grad(loss(whole, used), (hidden, weight, bias))
    assert_near(first, want, EXACT)
    assert_near(second, want, EXACT)


@pytest.mark.parametrize("entropy", [False, True])
def test_one_gradient_for_all_tokens(entropy: bool) -> None:
    hidden, weight, _, targets = leaves(809, torch.float32)
    got, want = (
        torch.autograd.grad(sum(part.sum() for part in outputs if part is not None), (hidden, weight))
        for outputs in (
            computed(kernel, hidden, targets, Head(weight=weight), entropy=entropy) for kernel in (Triton, Chunked)
        )
    )
    assert_near(got, want, EXACT)


@pytest.mark.parametrize("kernel", [Chunked, Triton])
def test_extreme_logits(kernel: type[LogitKernel]) -> None:
    random = torch.Generator().manual_seed(0)
    hidden = torch.randint(-100, 101, (TOKENS, 8), generator=random).float().to(DEVICE).requires_grad_()
    weight = torch.randint(-40, 41, (VOCABULARIES[-1], 8), generator=random).float().to(DEVICE).requires_grad_()
    targets = torch.randint(len(weight), (TOKENS,), generator=random).to(DEVICE)
    head = Head(weight=weight)
    outputs, want = computed(kernel, hidden, targets, head), plain(hidden, targets, head)
    assert float(want[0].detach().min()) < -2e4
    assert_near(outputs[:1], want[:1], EXACT)
    # In float32 the largest logits are multiples of 2^-8, and so are their differences.
    assert torch.allclose(outputs[1].double(), want[1], atol=5e-3)  # type: ignore[union-attr]
    got = torch.autograd.grad(loss(outputs, "log_probs+entropy"), (hidden, weight))
    assert_near(got, torch.autograd.grad(loss(want, "log_probs+entropy"), (hidden, weight)), 5e-3)


def test_a_target_outside_the_vocabulary_is_not_a_number() -> None:
    hidden, weight, _, targets = leaves(809, torch.float32)
    targets[3], targets[4] = 809, -1
    log_probs, _ = computed(Triton, hidden, targets, Head(weight=weight))
    assert log_probs.isnan().nonzero()[:, 0].tolist() == [3, 4]


@pytest.mark.skipif(not ON_GPU, reason="measures memory of the device")
@pytest.mark.parametrize(("dtype", "entropy"), product((torch.float32, torch.bfloat16), (False, True)))
def test_logits_of_one_chunk_exist(dtype: torch.dtype, entropy: bool) -> None:
    tokens, vocabulary, chunk = 4096, 50_000, 256
    hidden, weight, _, targets = leaves(vocabulary, dtype, tokens)
    # Before the first measurement: compiles, and takes the workspace of matrix products.
    for measured in (False, True):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        outputs = computed(Triton, hidden, targets, Head(weight=weight), chunk=chunk, entropy=entropy)
        used = "log_probs+entropy" if entropy else "log_probs"
        torch.autograd.grad(loss(outputs, used), (hidden, weight))
        taken = torch.cuda.max_memory_allocated() - before
        if measured:
            logits = chunk * vocabulary * (4 if dtype == torch.float32 else 4 + 2)
            gradients = (vocabulary + tokens) * HIDDEN * (4 + weight.element_size())
            assert taken < logits + gradients + 4 * 2**20 < tokens * vocabulary


@pytest.mark.skipif(
    not ON_GPU or torch.cuda.get_device_properties(0).total_memory < 20 * 2**30, reason="takes 15 GB of the device"
)
def test_more_logits_than_an_int32_counts() -> None:
    vocabulary, tokens = 151_936, 14_200
    assert vocabulary * tokens > 2**31
    hidden, weight, _, targets = leaves(vocabulary, torch.bfloat16, tokens)
    weight.requires_grad_(False)
    results: list[Any] = []
    for chunk in (tokens, 512):
        outputs = computed(Triton, hidden, targets, Head(weight=weight), chunk=chunk)
        results.append((*outputs, *torch.autograd.grad(loss(outputs, "log_probs+entropy"), hidden)))
    for whole, parts in zip(*results, strict=True):
        assert_near([whole[-64:]], [parts[-64:]], ROUNDED)


@pytest.mark.skipif(not ON_GPU, reason="asks for the kernel of a GPU")
def test_a_gpu_has_the_triton_kernel() -> None:
    assert logit_kernel(None, DEVICE) is logit_kernel("triton", DEVICE) is Triton
    assert logit_kernel("chunked", DEVICE) is Chunked
