"""Every estimator: what is asked of all of them, the reference vectors, and its formula written out in loops."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from statistics import fmean, pstdev, stdev
from typing import Any

import pytest
import torch
from torch import Tensor

from drivetrain.numerics import group_index
from drivetrain.testing import AdvantageConformance
from drivetrain_advantages import estimators

VECTORS = Path(__file__).parents[3] / "core/tests/data/rl_numerics.json"
OWN = ("dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "gpg")
CASES = [
    pytest.param(case, id=f"{number}-{case['name']}")
    for number, case in enumerate(json.loads(VECTORS.read_text())["cases"])
    if case["name"].removeprefix("advantage/") in OWN and case["name"].startswith("advantage/")
]


class TestDrGRPO(AdvantageConformance):
    name = "dr_grpo"


class TestRLOO(AdvantageConformance):
    name = "rloo"


class TestReinforcePlusPlus(AdvantageConformance):
    name = "reinforce_plus_plus"
    options = {"gamma": 0.9}
    equal_rewards_give_zero = False  # they differ from those of the other prompts


class TestReinforcePlusPlusBaseline(AdvantageConformance):
    name = "reinforce_plus_plus_baseline"


class TestReMax(AdvantageConformance):
    name = "remax"
    equal_rewards_give_zero = False  # they differ from that of the greedy response


class TestGPG(AdvantageConformance):
    name = "gpg"
    options = {"f_norm": 0.5}


class TestPassAtK(AdvantageConformance):
    name = "pass_at_k"
    options = {"k": 2, "threshold": 0.0}


def tensor(nested: Any) -> Tensor:
    return torch.tensor(nested, dtype=torch.float64)


@pytest.mark.parametrize("case", CASES)
def test_vector(case: dict[str, Any]) -> None:
    name, given = case["name"].removeprefix("advantage/"), case["inputs"]
    columns = ("token_level_rewards", "response_mask", "reward_baselines")
    batch = {key: tensor(given[key]) for key in columns if key in given}
    group = group_index(given.get("group", range(len(batch["response_mask"]))))
    options = {key: given[key] for key in ("gamma", "f_norm") if key in given}
    result = getattr(estimators, name)(batch, group, **options)
    expected, tolerance = tensor(case["outputs"]["advantages"]), 1e-8
    rewarded = (batch["token_level_rewards"].sum(-1) != 0).double().mean()
    if name == "gpg" and rewarded < 1:
        # verl's alpha counts rows whose reward is not 0, in float32; the paper's, those of groups that differ (eq. 7)
        expected, tolerance = expected * rewarded, 5e-8
    if isinstance(result, tuple):
        result, returns = result
        torch.testing.assert_close(returns, tensor(case["outputs"]["returns"]), rtol=0, atol=tolerance)
    torch.testing.assert_close(result, expected, rtol=0, atol=tolerance)


def test_both_kinds_of_mask_are_there() -> None:
    assert len(CASES) == 2 * len(OWN)


# -- the formulas, response by response --------------------------------------------------------------------------------


def draw(seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """12 responses to 3 prompts in mixed order, of 0 to 5 tokens, with a reward at every token and NaN beyond the mask.

    The responses to the third prompt have equal rewards.
    """
    generator = torch.Generator().manual_seed(seed)
    group = torch.randperm(12, generator=generator) % 3
    mask = (torch.rand(12, 5, generator=generator) < 0.7).long()
    mask[seed % 12] = 0
    rewards = torch.randint(-2, 4, (12, 5), generator=generator).double() / 4
    rewards[group == 2] = 0.0
    return {
        "response_mask": mask,
        "token_level_rewards": torch.where(mask != 0, rewards, torch.nan),
        "reward_baselines": torch.randn(12, generator=generator, dtype=torch.float64),
    }, group


def tokens(batch: dict[str, Tensor], row: int) -> list[int]:
    """The places of the selected tokens of a row."""
    return [t for t in range(5) if batch["response_mask"][row, t] != 0]


def reward(batch: dict[str, Tensor], row: int) -> float:
    return sum(batch["token_level_rewards"][row, t].item() for t in tokens(batch, row))


def prompts(batch: dict[str, Tensor], group: Tensor) -> Iterator[dict[int, float]]:
    """Of each prompt, the reward of each row that has a token."""
    for number in range(3):
        rows = [row for row in range(12) if group[row] == number and tokens(batch, row)]
        yield {row: reward(batch, row) for row in rows}


def plain_dr_grpo(batch: dict[str, Tensor], group: Tensor) -> dict[int, float]:
    return {i: s - fmean(g.values()) for g in prompts(batch, group) for i, s in g.items()}


def plain_rloo(batch: dict[str, Tensor], group: Tensor) -> dict[int, float]:
    result = {}
    for scores in prompts(batch, group):
        for i in scores:
            others = [scores[j] for j in scores if j != i]
            result[i] = scores[i] - fmean(others) if others else 0.0
    return result


def plain_gpg(batch: dict[str, Tensor], group: Tensor) -> dict[int, float]:
    sizes = [(len(g), len(set(g.values())) == 1) for g in prompts(batch, group)]
    in_batch, without_gradient = sum(n for n, _ in sizes), sum(n for n, equal in sizes if equal)
    alpha = in_batch / (in_batch - without_gradient)
    return {i: alpha * centred / 0.5 for i, centred in plain_dr_grpo(batch, group).items()}


def plain_pass_at_k(batch: dict[str, Tensor], group: Tensor, k: int) -> dict[int, float]:
    """From the definition: score every subset of k, and normalise; a response has the mean of its subsets."""
    result = {}
    for scores in prompts(batch, group):
        subsets = {chosen: float(any(scores[i] > 0.5 for i in chosen)) for chosen in combinations(scores, k)}
        mean, std = fmean(subsets.values()), pstdev(subsets.values())
        for i in scores:
            own = [(value - mean) / std for chosen, value in subsets.items() if i in chosen] if std else [0.0]
            result[i] = fmean(own)
    return result


PLAIN: dict[str, tuple[dict[str, Any], Callable[..., dict[int, float]]]] = {
    "dr_grpo": ({}, plain_dr_grpo),
    "rloo": ({}, plain_rloo),
    "gpg": ({"f_norm": 0.5}, plain_gpg),
    "pass_at_1": ({"k": 1}, lambda *given: plain_pass_at_k(*given, k=1)),
    "pass_at_2": ({"k": 2}, lambda *given: plain_pass_at_k(*given, k=2)),
    "pass_at_3": ({"k": 3}, lambda *given: plain_pass_at_k(*given, k=3)),
}
seeds = pytest.mark.parametrize("seed", range(20))


@seeds
@pytest.mark.parametrize("name", PLAIN)
def test_formula_of_a_response(name: str, seed: int) -> None:
    batch, group = draw(seed)
    options, plain = PLAIN[name]
    estimator = estimators.pass_at_k if "k" in options else getattr(estimators, name)
    actual, expected = estimator(batch, group, **options), plain(batch, group)
    for row in range(12):
        for t in range(5):
            value = expected[row] if t in tokens(batch, row) else 0.0
            assert actual[row, t].item() == pytest.approx(value, abs=1e-12)


def whitened(values: dict[tuple[int, int], float]) -> dict[tuple[int, int], float]:
    mean, std = fmean(values.values()), stdev(values.values())
    return {place: (value - mean) / (std**2 + 1e-8) ** 0.5 for place, value in values.items()}


def plain_returns(batch: dict[str, Tensor], gamma: float) -> dict[tuple[int, int], float]:
    """The discounted sum of the rewards from each selected token on; time counts selected tokens."""
    result = {}
    for row in range(12):
        places = tokens(batch, row)
        for start, t in enumerate(places):
            later = enumerate(places[start:])
            result[row, t] = sum(gamma**step * batch["token_level_rewards"][row, u].item() for step, u in later)
    return result


@seeds
def test_formula_of_a_token(seed: int) -> None:
    batch, group = draw(seed)
    centred = plain_dr_grpo(batch, group)
    expected = {
        "reinforce_plus_plus": whitened(plain_returns(batch, 0.9)),
        "reinforce_plus_plus_baseline": whitened({(i, t): centred[i] for i in centred for t in tokens(batch, i)}),
        "remax": {(i, t): value - batch["reward_baselines"][i].item()
                  for (i, t), value in plain_returns(batch, 1.0).items()},
    }  # fmt: skip
    actual = {
        "reinforce_plus_plus": estimators.reinforce_plus_plus(batch, group, gamma=0.9)[0],
        "reinforce_plus_plus_baseline": estimators.reinforce_plus_plus_baseline(batch, group),
        "remax": estimators.remax(batch, group),
    }
    for name, values in expected.items():
        for row in range(12):
            for t in range(5):
                assert actual[name][row, t].item() == pytest.approx(values.get((row, t), 0.0), abs=1e-10), name


# -- the edges ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dr_grpo", "rloo", "reinforce_plus_plus_baseline", "gpg"])
def test_groups_of_one_have_advantage_0(name: str) -> None:
    batch, _ = draw(3)
    assert getattr(estimators, name)(batch, torch.arange(12)).abs().sum() == 0


def test_a_group_of_fewer_than_k_has_advantage_0() -> None:
    batch = {"response_mask": torch.ones(5, 1), "token_level_rewards": tensor([[1.0], [0.0], [1.0], [0.0], [0.0]])}
    result = estimators.pass_at_k(batch, torch.tensor([0, 0, 1, 1, 1]), k=3)
    assert result.abs().sum() == 0  # of the second group, the only subset of 3 is right
    result = estimators.pass_at_k(batch, torch.tensor([0, 0, 1, 1, 1]), k=2)
    assert result[:2].abs().sum() == 0 and (result[2:, 0] * 2**0.5).tolist() == pytest.approx([1.0, -0.5, -0.5])


@pytest.mark.parametrize("k", [0, 6])
def test_k_has_to_fit_the_groups(k: int) -> None:
    with pytest.raises(ValueError, match=f"at most the number of responses to a prompt; got {k}"):
        estimators.pass_at_k(*draw(0), k=k)


def test_f_norm_is_above_0() -> None:
    with pytest.raises(ValueError, match="f_norm must be above 0"):
        estimators.gpg(*draw(0), f_norm=0.0)


def test_one_selected_token_in_the_batch() -> None:
    batch = {"response_mask": tensor([[1, 0], [0, 0]]), "token_level_rewards": tensor([[1.0, 9.0], [9.0, 9.0]])}
    advantages, returns = estimators.reinforce_plus_plus(batch, torch.tensor([0, 0]))
    assert advantages.tolist() == [[0.0, 0.0], [0.0, 0.0]] and returns.tolist() == [[1.0, 0.0], [0.0, 0.0]]


def test_an_easy_prompt_weighs_less_under_pass_at_k() -> None:
    """Of 8 responses, 6 right: with k = 4 no subset is all wrong, and there is nothing to learn; with k = 2, little."""
    batch = {"response_mask": torch.ones(8, 1), "token_level_rewards": tensor([[1.0]] * 6 + [[0.0]] * 2)}
    weight = [estimators.pass_at_k(batch, torch.zeros(8, dtype=torch.long), k=k).abs().sum() for k in (1, 2, 4)]
    assert weight[0] > weight[1] > weight[2] == 0
