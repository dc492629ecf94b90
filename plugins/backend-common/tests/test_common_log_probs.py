"""Log-probabilities, entropies and their gradients in chunks, beside plain autograd over all logits at once."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from drivetrain_backend_common.log_probs import Head, token_log_probs

TOKENS, HIDDEN, VOCAB, TEMPERATURE = 11, 6, 17, 0.7
CHUNKS = (1, 4, 10, 11, 64)


def leaves(seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, bias and targets."""
    random = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random).to(dtype).requires_grad_()

    return drawn(TOKENS, HIDDEN), drawn(VOCAB, HIDDEN), drawn(VOCAB), torch.randint(VOCAB, (TOKENS,), generator=random)


def plain(hidden: Tensor, targets: Tensor, head: Head) -> tuple[Tensor, Tensor]:
    """The same in float64, all logits at once."""
    logits = hidden.double() @ head.weight.double().t()
    if head.bias is not None:
        logits = logits + head.bias.double()
    logits = logits * head.scale
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    log_p = (logits / TEMPERATURE).log_softmax(-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def chunked(hidden: Tensor, targets: Tensor, head: Head, chunk: int, entropy: bool) -> tuple[Tensor, Tensor | None]:
    return token_log_probs(hidden, targets, head, temperature=TEMPERATURE, chunk_tokens=chunk, entropy=entropy)


def weighted(outputs: tuple[Tensor, Tensor | None], used: str) -> Tensor:
    """A loss that gives each token, and each kind of output in use, a gradient of its own."""
    slopes = torch.linspace(-1, 2, TOKENS, dtype=torch.float64)
    parts = {"log_probs": outputs[0], "entropy": outputs[1]}
    return sum((parts[name].double() * slopes.roll(len(name))).sum() for name in used.split("+"))  # type: ignore


def assert_near(got: Any, want: Any, limit: float) -> None:
    """Differences below ``limit`` of the largest number."""
    for ours, theirs in zip(got, want, strict=True):
        ours, theirs = ours.detach().double(), theirs.detach().double()
        assert float((ours - theirs).abs().max()) <= limit * float(theirs.abs().max())


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("used", ["log_probs", "entropy", "log_probs+entropy"])
@pytest.mark.parametrize(("bias", "scale", "softcap"), product((False, True), (1.0, 0.3), (None, 2.0)))
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 2e-6), (torch.bfloat16, 3e-2)])
def test_gradients_equal_plain_autograd(
    chunk: int, used: str, bias: bool, scale: float, softcap: float | None, dtype: torch.dtype, limit: float
) -> None:
    hidden, weight, offset, targets = leaves(dtype=dtype)
    head = Head(weight=weight, bias=offset if bias else None, scale=scale, softcap=softcap)
    learnt = [hidden, weight, offset] if bias else [hidden, weight]
    outputs = chunked(hidden, targets, head, chunk, "entropy" in used)
    want = plain(hidden, targets, head)
    assert_near([part for part in outputs if part is not None], want[: 1 + ("entropy" in used)], limit)
    got_grads = torch.autograd.grad(weighted(outputs, used), learnt)
    assert [grad.dtype for grad in got_grads] == [dtype] * len(learnt)
    assert_near(got_grads, torch.autograd.grad(weighted(want, used), learnt), limit)


@pytest.mark.parametrize("learns", product((False, True), repeat=3))
def test_gradients_of_some_inputs(learns: tuple[bool, bool, bool]) -> None:
    hidden, weight, bias, targets = leaves()
    learnt = [leaf.requires_grad_(wanted) for leaf, wanted in zip((hidden, weight, bias), learns, strict=True)]
    learnt = [leaf for leaf in learnt if leaf.requires_grad]
    head = Head(weight=weight, bias=bias)
    got = weighted(chunked(hidden, targets, head, 4, True), "log_probs+entropy")
    assert got.requires_grad == any(learns)
    if learnt:
        want = weighted(plain(hidden, targets, head), "log_probs+entropy")
        assert_near(torch.autograd.grad(got, learnt), torch.autograd.grad(want, learnt), 2e-6)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("used", ["log_probs", "log_probs+entropy"])
def test_two_forward_passes_before_their_backward_passes(order: tuple[int, int], chunk: int, used: str) -> None:
    made = [leaves(seed) for seed in (0, 1)]
    heads = [Head(weight=weight, bias=bias) for _, weight, bias, _ in made]
    losses = [
        weighted(chunked(hidden, targets, head, chunk, "entropy" in used), used)
        for (hidden, _, _, targets), head in zip(made, heads, strict=True)
    ]
    for index in order:
        hidden, weight, bias, targets = made[index]
        got = torch.autograd.grad(losses[index], (hidden, weight, bias))
        want = torch.autograd.grad(weighted(plain(hidden, targets, heads[index]), used), (hidden, weight, bias))
        assert_near(got, want, 2e-6)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("used", ["log_probs", "log_probs+entropy"])
def test_a_second_backward_pass_through_a_kept_graph(chunk: int, used: str) -> None:
    hidden, weight, bias, targets = leaves()
    outputs = chunked(hidden, targets, Head(weight=weight, bias=bias), chunk, "entropy" in used)
    before = [part.detach().clone() for part in outputs if part is not None]
    first = torch.autograd.grad(weighted(outputs, used), (hidden, weight, bias), retain_graph=True)
    second = torch.autograd.grad(weighted(outputs, used), (hidden, weight, bias))
    assert_near(second, first, 2e-6)
    assert all(part.equal(was) for part, was in zip([o for o in outputs if o is not None], before, strict=True))


class Largest(TorchDispatchMode):
    """The memory of all tensors of (rows, VOCAB) that operations returned: ``rows`` of each by its address."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[int, int] = {}
        self.alive: list[Tensor] = []  # so that no address is used twice

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor) and tensor.dim() == 2 and tensor.shape[1] == VOCAB and len(tensor):
                self.alive.append(tensor)
                place = tensor.untyped_storage().data_ptr()
                self.rows[place] = max(self.rows.get(place, 0), len(tensor))
        return result


@pytest.mark.parametrize(
    ("used", "softcap", "tensors"),
    [("log_probs", None, 1), ("log_probs", 2.0, 2), ("log_probs+entropy", None, 3), ("log_probs+entropy", 2.0, 3)],
)
def test_logits_share_memory(used: str, softcap: float | None, tensors: int) -> None:
    hidden, weight, _, targets = leaves()
    with Largest() as seen:
        outputs = chunked(hidden, targets, Head(weight=weight, softcap=softcap), 3, "entropy" in used)
        weighted(outputs, used).backward(inputs=[hidden])
    del seen.rows[weight.untyped_storage().data_ptr()]  # transposed, it has the shape too
    # With entropies each pass has a second tensor, and the forward pass's is gone when the backward pass makes its own.
    assert sorted(seen.rows.values()) == [3] * tensors
