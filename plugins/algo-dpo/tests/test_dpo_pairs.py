"""Pairs as rows of a batch, which nothing separates."""

from __future__ import annotations

import pytest
import torch

from drivetrain import DataProto, DPComputeMetric, LossTerm, RankLayout
from drivetrain.metrics import Sum
from drivetrain.numerics import Counts, LossInputs, group_index
from drivetrain_algo_dpo.loss import dpo
from drivetrain_algo_dpo.pairs import as_pairs, best_and_worst, join_pairs, scored_pairs


def answers(lengths: list[int], width: int, first: int, prompt: int = 2) -> DataProto:
    """Responses of these lengths to prompts whose width may be theirs."""
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    prompts = torch.arange(len(lengths) * prompt).view(-1, prompt) + 1
    responses = (first + torch.arange(len(lengths) * width)).view(-1, width) * mask
    return DataProto.from_single_dict({
        "prompts": prompts, "responses": responses, "response_mask": mask,
        "input_ids": torch.cat([prompts, responses], 1),
        "attention_mask": torch.cat([torch.ones_like(prompts), mask], 1),
        "uid": [f"p{row}" for row in range(len(lengths))],
    })  # fmt: skip


def test_two_batches_become_pairs() -> None:
    better, worse = answers([2, 1], 2, first=50), answers([4, 3], 4, first=70).with_columns(sample_index=torch.zeros(2))
    pairs = join_pairs(better, worse)
    assert pairs["preference"].tolist() == [1, -1, 1, -1]
    assert pairs["uid"].tolist() == pairs["loss_group"].tolist() == ["p0", "p0", "p1", "p1"]
    assert pairs["responses"].tolist() == [[50, 51, 0, 0], [70, 71, 72, 73], [52, 0, 0, 0], [74, 75, 76, 0]]
    assert pairs["response_mask"].sum(1).tolist() == [2, 4, 1, 3]
    assert pairs["prompts"].tolist() == [[1, 2], [1, 2], [3, 4], [3, 4]]
    assert torch.equal(pairs["input_ids"], torch.cat([pairs["prompts"], pairs["responses"]], 1))
    assert torch.equal(pairs["attention_mask"][:, 2:], pairs["response_mask"])
    assert "sample_index" not in pairs


def test_it_does_not_matter_which_is_wider() -> None:
    one, other = (
        join_pairs(answers([2], 2, 50), answers([4], 4, 70)),
        join_pairs(answers([4], 4, 70), answers([2], 2, 50)),
    )
    assert torch.equal(one["input_ids"], other["input_ids"].flip(0))


def test_answers_to_other_prompts_are_no_pairs() -> None:
    with pytest.raises(ValueError, match="same batch of prompts"):
        join_pairs(answers([1], 2, 50), answers([1], 2, 50, prompt=3))
    with pytest.raises(ValueError, match="responses to one prompt"):
        as_pairs(answers([1, 1], 2, 50))
    with pytest.raises(ValueError, match="responses to one prompt"):
        as_pairs(answers([1], 2, 50))


def test_best_and_worst() -> None:
    batch = answers([1] * 9, 2, 50).with_columns(
        uid=[f"p{row // 3}" for row in range(9)], scores=torch.tensor([0.0, 2, 1, 5, 5, 5, 1, 0, 0])
    )
    assert best_and_worst(batch, 3).tolist() == [1, 0, 3, 3, 6, 7]
    pairs = scored_pairs(batch, 3)
    assert pairs["scores"].tolist() == [2, 0, 5, 5, 1, 0]
    assert pairs["response_mask"].sum(1).tolist() == [1, 1, 0, 0, 1, 1]
    assert [part["uid"].tolist() for part in pairs.mini_batches(1)] == [["p0"] * 2, ["p1"] * 2, ["p2"] * 2]
    assert Counts.of(pairs["response_mask"], group_index(pairs["uid"].tolist())).groups == 2


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_sum_to_the_whole(ranks: int) -> None:
    """Dispatched as an update is, whatever the lengths, each rank has whole pairs and the shares are the loss."""
    generator = torch.Generator().manual_seed(1)
    pairs = join_pairs(answers([1, 4, 2, 6, 1], 6, 10), answers([6, 1, 1, 2, 3], 8, 60))
    order = torch.randperm(10, generator=generator)
    drawn = {name: -torch.rand(10, 8, generator=generator) for name in ("log_probs", "ref_log_probs")}
    batch = pairs.with_columns(**drawn)[order]
    counts = Counts.of(batch["response_mask"], group_index(batch["uid"].tolist()))

    def share(data: DataProto) -> float:
        columns = {**dict(data.batch), "loss_group": group_index(data["loss_group"].tolist())}
        return float(dpo(LossInputs(log_probs=data["log_probs"]), columns, counts).loss)

    mode, seen = DPComputeMetric(), []
    layouts = [RankLayout(dp=rank, dp_size=ranks) for rank in range(ranks)]
    calls = mode.split(layouts, (), {"batch": batch, "terms": [LossTerm("dpo")]})
    for _, kwargs in calls:
        seen += kwargs["batch"]["uid"].tolist()
    results = [{"loss": Sum(share(kwargs["batch"]))} for _, kwargs in calls]
    assert sorted(seen) == sorted(batch["uid"].tolist())
    assert mode.collect(layouts, results)["loss"].result() == pytest.approx(share(batch), abs=1e-6)
