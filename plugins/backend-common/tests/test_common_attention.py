"""Attention of parts of sequences: the rows of the whole that are theirs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen as torch_varlen

from drivetrain import UserError
from drivetrain_backend_common.attention_kernels import Kernel
from drivetrain_backend_common.flash import Varlen
from drivetrain_backend_common.flex import Flex
from drivetrain_backend_common.sdpa import Sdpa, groups

CPU = torch.device("cpu")
LENGTHS = (12, 16, 4)  # of sequences, of which there are the second and third quarter, and the first and last
QUARTERS = ((1, 2), (0, 3))


def drawn(device: torch.device = CPU, dim: int = 8, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Queries of 4 heads, keys and values of 2, ``(1, heads, tokens, dim)``."""
    random = torch.Generator().manual_seed(0)
    shapes = [(1, heads, sum(LENGTHS), dim) for heads in (4, 2, 2)]
    return [torch.randn(shape, generator=random).to(device, dtype).requires_grad_() for shape in shapes]


def by_parts(kind: type[Kernel], tensors: Sequence[Tensor], quarters: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Attention of the parts, and the places of their tokens among all."""
    query, key, value = tensors
    own: list[Tensor] = []
    seen: list[Tensor] = []
    start = 0
    for length in LENGTHS:
        for quarter in quarters:
            span = torch.arange(start, start + length, device=query.device)
            seen.append(span[: length // 4 * (quarter + 1)])
            own.append(seen[-1][-length // 4 :])
        start += length
    kernel = kind([len(part) for part in own], query.device, [len(part) for part in seen])
    rows, keys = torch.cat(own), torch.cat(seen)
    got = kernel(query[:, :, rows], key[:, :, keys], value[:, :, keys], None, scaling=0.3, softcap=None)
    return got, rows


def varlen_attn(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, key_ends: Tensor, longest: int, longest_key: int, *,
    scale: float, window_size: tuple[int, int], enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """What PyTorch's kernel documents: the last query looks at the last key."""
    assert window_size == (-1, 0) and ends.dtype == key_ends.dtype == torch.int32
    assert longest == int(ends.diff().max()) and longest_key == int(key_ends.diff().max())
    key, value = (tensor.repeat_interleave(query.shape[1] // tensor.shape[1], dim=1) for tensor in (key, value))
    parts = []
    for q, k, v in zip(*(tensor.split(bounds.diff().tolist()) for tensor, bounds in (
            (query, ends), (key, key_ends), (value, key_ends))), strict=True):  # fmt: skip
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        hidden = torch.ones(len(q), len(k), dtype=torch.bool).triu(len(k) - len(q) + 1)
        parts.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v))
    return torch.cat(parts)


@pytest.mark.parametrize("kind", [Sdpa, Varlen])
@pytest.mark.parametrize("quarters", QUARTERS)
def test_parts_are_rows_of_the_whole(
    kind: type[Kernel], quarters: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_varlen, "varlen_attn", varlen_attn)
    tensors, others = drawn(), drawn()
    got, rows = by_parts(kind, tensors, quarters)
    want = Sdpa(LENGTHS, CPU)(*others, None, scaling=0.3, softcap=None)[rows]
    torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-5)
    slope = torch.randn(want.shape, generator=torch.Generator().manual_seed(1))
    for out in (got, want):
        out.backward(slope)
    for ours, theirs in zip(tensors, others, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=2e-6, rtol=1e-5)


def test_flex_has_no_parts() -> None:
    with pytest.raises(UserError, match="a part of each sequence"):
        Flex((4,), CPU, (8,))


@pytest.mark.parametrize("lengths", [(12, 16, 4), (16, 15, 13, 2), (4, 4), (1, 9, 9, 1)])
def test_sequences_in_any_order_are_whole_groups(lengths: tuple[int, ...]) -> None:
    tensors: list[Any] = [torch.randn(1, 2, sum(lengths), 4) for _ in range(3)]
    got = Sdpa(lengths, CPU)(*tensors, None, scaling=None, softcap=None)
    spans = zip(*(tensor.split(lengths, 2) for tensor in tensors), strict=True)
    alone = [Sdpa((q.shape[2],), CPU)(q, k, v, None, scaling=None, softcap=None) for q, k, v in spans]
    torch.testing.assert_close(got, torch.cat(alone), atol=1e-6, rtol=1e-5)
    assert sum(group.sequences for group in groups(lengths, CPU)) == len(lengths)
