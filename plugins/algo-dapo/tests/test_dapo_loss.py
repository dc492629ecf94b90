"""The objective equals equation 8 of the paper and the penalty equation 13, written out with loops."""

from __future__ import annotations

import math
from pathlib import Path

import dapo_rig as rig
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from drivetrain import DataProto
from drivetrain.numerics import Counts, LossInputs
from drivetrain.seam.registry import resolve
from drivetrain_algo_dapo.algorithm import DAPO
from drivetrain_algo_dapo.config import DAPOConfig


def dapo(**options: float | None) -> DAPO:
    return DAPO(DAPOConfig(name="dapo", **options))


def paper(log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Minus equation 8: the mean over all tokens of all responses."""
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for i in range(mask.shape[0]):
        for t in range(mask.shape[1]):
            if mask[i, t]:
                ratio = torch.exp(log_probs[i, t] - old[i, t])
                clipped = min(max(ratio, ratio.new_tensor(0.8)), ratio.new_tensor(1.28))
                total = total + min(ratio * advantages[i, t], clipped * advantages[i, t])
                tokens += 1
    return -total / tokens


@pytest.mark.parametrize("seed", range(4))
def test_the_loss_is_that_of_the_paper(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    old, advantages, noise = torch.randn(3, 5, 7, generator=generator, dtype=torch.float64)
    mask = (torch.arange(7) < torch.tensor([[7], [1], [4], [6], [2]])).long()
    log_probs = (old + 0.3 * noise).requires_grad_()
    want = paper(log_probs, old, advantages, mask)
    (want_gradient,) = torch.autograd.grad(want, log_probs)
    batch = {"response_mask": mask, "old_log_probs": old, "advantages": advantages}
    terms = [term for term in dapo().loss_terms("actor") if term.weight]
    assert [term.name for term in terms] == ["clip"]  # no KL divergence, no entropy bonus
    found = torch.zeros((), dtype=torch.float64)
    for rows in ([0, 1], [2, 3, 4]):  # in two micro-batches
        part = {name: column[rows] for name, column in batch.items()}
        loss = resolve("policy_losses", "clip")
        found = found + loss(LossInputs(log_probs=log_probs[rows]), part, Counts.of(mask), **terms[0].args).loss
    torch.testing.assert_close(found, want, rtol=0, atol=1e-10)
    torch.testing.assert_close(torch.autograd.grad(found, log_probs)[0], want_gradient, rtol=0, atol=1e-10)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(0, 10), min_size=1, max_size=6), st.integers(1, 10), st.floats(0, 3))
def test_the_penalty_is_that_of_the_paper(lengths: list[int], cache: int, weight: float) -> None:
    mask = (torch.arange(10) < torch.tensor(lengths)[:, None]).long()
    found = dapo(overlong_penalty=weight, overlong_cache_tokens=cache).length_penalty(mask)
    for row, length in enumerate(lengths):
        if length <= 10 - cache:
            want = 0.0
        else:
            want = ((10 - cache) - length) / cache
        assert -float(found[row].sum()) == pytest.approx(weight * want, abs=1e-6)
        assert [t for t in range(10) if found[row, t]] in ([], [length - 1])


@pytest.mark.parametrize("longest, cache", [(20480, 4096), (6, 2), (5, 1), (1, 1)])
def test_a_fifth_of_the_longest_response_is_penalized_if_nothing_is_said(longest: int, cache: int) -> None:
    mask = (torch.arange(longest) < torch.tensor([[longest - cache], [longest - cache + 1], [longest]])).long()
    found = dapo().length_penalty(mask).sum(1)
    assert found.tolist() == pytest.approx([0, 1 / cache, 1])


@pytest.fixture(scope="module")
def collected(run_file: Path) -> DataProto:
    """A batch of real completions, some of them cut off."""
    with rig.opened(run_file) as made:
        batch = made.collect()
    cut = batch["finish_reason"] == "length"
    assert 0 < cut.sum() < len(cut)
    return batch


def test_responses_that_were_cut_off_are_left_out_of_the_loss(run_file: Path, collected: DataProto) -> None:
    cut = torch.tensor([reason == "length" for reason in collected["finish_reason"]])
    spoiled = collected.with_columns(**{name: collected[name].masked_fill(cut[:, None], math.nan)
                                        for name in ("advantages", "old_log_probs")})  # fmt: skip
    learned = []
    for batch in (collected, spoiled, collected[~cut]):
        with rig.opened(run_file, "algorithm.mask_truncated=true", "actor.mini_batch_prompts=null") as made:
            start = made.weights()
            learned.append(made.learn(batch))
            assert all(math.isfinite(value) for value in made.metrics.values())
    assert rig.distance(learned[0], start) > 1e-3
    assert rig.distance(learned[0], learned[1]) == 0
    assert rig.distance(learned[0], learned[2]) < 2e-5
    with rig.opened(run_file, "actor.mini_batch_prompts=null") as made:
        assert rig.distance(made.learn(collected), learned[0]) > 1e-3  # and in it, if nothing is said


def test_a_batch_of_nothing_but_cut_off_responses_changes_nothing(run_file: Path, collected: DataProto) -> None:
    batch = collected.with_columns(finish_reason=["length"] * len(collected))
    with rig.opened(run_file, "algorithm.mask_truncated=true") as made:
        start = made.weights()
        assert rig.distance(made.learn(batch), start) == 0
    assert made.metrics["loss"] == 0


def test_cut_off_responses_stay_in_their_group(run_file: Path, collected: DataProto) -> None:
    with rig.opened(run_file, "algorithm.mask_truncated=true") as made:
        batch = made.collect()
    assert batch["advantages"].equal(collected["advantages"]) and batch["response_mask"].equal(
        collected["response_mask"]
    )
