"""Random batches and the loss terms under test."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from hypothesis import strategies as st
from torch import Tensor

from drivetrain.metrics import Metric
from drivetrain.numerics import (
    AGGREGATIONS,
    KL_KINDS,
    Counts,
    LossInputs,
    LossResult,
    clip,
    entropy_bonus,
    kl_to_ref,
    value_clip,
)

TERMS: dict[str, Callable[..., LossResult]] = {
    "clip": partial(clip, clip_high=0.28),
    "clip_dual": partial(clip, clip_dual=1.5),
    "entropy_bonus": entropy_bonus,
    "value_clip": value_clip,
    **{f"kl_{kind}": partial(kl_to_ref, kind=kind) for kind in KL_KINDS},
}

SCALES = {mode: 5.0 if mode == "seq-mean-token-sum-norm" else None for mode in AGGREGATIONS}


@dataclass(frozen=True)
class Case:
    """Columns and model outputs, float64, each (rows, response)."""

    outputs: dict[str, Tensor]
    batch: dict[str, Tensor]

    @property
    def mask(self) -> Tensor:
        return self.batch["response_mask"]

    def map(self, change: Callable[[Tensor], Tensor]) -> Case:
        return Case({k: change(v) for k, v in self.outputs.items()}, {k: change(v) for k, v in self.batch.items()})

    def poisoned(self) -> Case:
        """NaN, inf and -inf at every masked position of every tensor but the mask."""

        def poison(values: Tensor) -> Tensor:
            bad = torch.tensor([float("nan"), float("inf"), float("-inf")], dtype=values.dtype)
            return torch.where(self.mask != 0, values, bad[torch.arange(values.numel()) % 3].view(values.shape))

        return replace(self.map(poison), batch={**self.map(poison).batch, "response_mask": self.mask})


@st.composite
def cases(draw: st.DrawFn, max_rows: int = 5, max_width: int = 7) -> Case:
    """Any mask, rows and batches without a selected token included; log-ratios on both sides of every clip."""
    rows, width = draw(st.integers(1, max_rows)), draw(st.integers(1, max_width))
    bits = draw(st.lists(st.booleans(), min_size=rows * width, max_size=rows * width))
    source = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def normal(scale: float = 1.0) -> Tensor:
        return torch.randn(rows, width, generator=source, dtype=torch.float64) * scale

    old = normal() - 2
    return Case(
        outputs={"log_probs": old + normal(0.7), "entropy": normal().abs(), "values": normal()},
        batch={
            "response_mask": torch.tensor(bits, dtype=torch.float64).view(rows, width),
            "old_log_probs": old,
            "ref_log_probs": old + normal(0.7),
            "advantages": normal(),
            "rollout_is_weights": normal().abs(),
            "values": normal(),
            "returns": normal(),
            "token_level_rewards": normal(),
        },
    )


def evaluate(
    term: str, case: Case, mode: str, counts: Counts | None = None
) -> tuple[Tensor, dict[str, Tensor], Mapping[str, Metric]]:
    """A term's loss, its gradients by output name (zeros where the term does not use the output), its metrics."""
    leaves = {name: values.clone().requires_grad_() for name, values in case.outputs.items()}
    whole = counts or Counts.of(case.mask)
    result = TERMS[term](LossInputs(**leaves), case.batch, whole, aggregation=mode, scale=SCALES[mode])
    result.loss.backward()
    grads = {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()}
    return result.loss.detach(), grads, result.metrics
