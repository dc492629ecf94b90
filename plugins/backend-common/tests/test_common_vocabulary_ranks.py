"""Ranks that share the vocabulary compute what one does with all of it."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from drivetrain_backend_common.log_probs import Head, token_log_probs

TOKENS, HIDDEN, VOCABULARY = 13, 8, 23


class Ranks:
    """Threads in place of processes: each call waits for all, and reduces what they bring."""

    def __init__(self, rank: int, start: int, barrier: threading.Barrier, brought: list[Any]) -> None:
        self.rank, self.start, self._barrier, self._brought = rank, start, barrier, brought

    def _all(self, tensor: Tensor) -> Tensor:
        self._brought[self.rank] = tensor
        self._barrier.wait()
        stacked = torch.stack(self._brought)
        self._barrier.wait()
        return stacked

    def sum(self, tensor: Tensor) -> Tensor:
        return self._all(tensor).sum(0)

    def max(self, tensor: Tensor) -> Tensor:
        return self._all(tensor).amax(0)


def drawn() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(3)
    hidden = torch.randn(TOKENS, HIDDEN, generator=random, dtype=torch.float64)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=random, dtype=torch.float64)
    bias = torch.randn(VOCABULARY, generator=random, dtype=torch.float64)
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=random)
    targets[:2] = torch.tensor([0, VOCABULARY - 1])
    return hidden, weight, bias, targets


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_equal_to_float64_on_the_whole_vocabulary(count: int, softcap: float | None, entropy: bool) -> None:
    leaves = [tensor.requires_grad_() for tensor in drawn()[:3]]
    hidden, weight, bias = leaves
    targets, slopes = drawn()[3], torch.linspace(-1, 2, TOKENS, dtype=torch.float64)
    z = (hidden @ weight.t() + bias) * 1.5
    z = (z if softcap is None else softcap * (z / softcap).tanh()) / 0.7
    log_p = z.log_softmax(-1)
    chosen, entropies = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    ((chosen * slopes).sum() + ((entropies * slopes.flip(0)).sum() if entropy else 0)).backward()

    size, barrier, brought = -(-VOCABULARY // count), threading.Barrier(count), [None] * count
    found: list[Any] = [None] * count

    def work(rank: int) -> None:
        rows = slice(rank * size, (rank + 1) * size)
        mine = [tensor.detach().float().requires_grad_() for tensor in (hidden, weight[rows], bias[rows])]
        got = token_log_probs(
            mine[0], targets, Head(weight=mine[1], bias=mine[2], scale=1.5, softcap=softcap), temperature=0.7,
            chunk_tokens=5, entropy=entropy, ranks=Ranks(rank, rank * size, barrier, brought),
        )  # fmt: skip
        loss = (got[0] * slopes.float()).sum()
        (loss if got[1] is None else loss + (got[1] * slopes.float().flip(0)).sum()).backward()
        found[rank] = got, [tensor.grad for tensor in mine]

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for (log_probs, got_entropies), _ in found:
        torch.testing.assert_close(log_probs.double(), chosen.detach(), atol=5e-6, rtol=5e-6)
        if got_entropies is not None:
            torch.testing.assert_close(got_entropies.double(), entropies.detach(), atol=1e-5, rtol=1e-5)
    gradients = (sum(grads[0] for _, grads in found), *(torch.cat([grads[n] for _, grads in found]) for n in (1, 2)))
    for got, leaf in zip(gradients, leaves, strict=True):
        torch.testing.assert_close(got.double(), leaf.grad, atol=2e-5, rtol=2e-5)
