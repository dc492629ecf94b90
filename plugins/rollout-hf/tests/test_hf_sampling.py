"""The distribution that tokens are drawn from, and the log-probs that are told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_hf import EOS, FAMILIES, one, prompts, request, tiny

from drivetrain import NonFiniteError, SamplingParams
from drivetrain_rollout_hf.randomness import stream_keys, uniforms
from drivetrain_rollout_hf.sampling import invert

SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7, "top_k": 5},
    {"top_p": 0.7},
    {"min_p": 0.2},
    {"temperature": 1.3, "top_k": 9, "top_p": 0.8, "min_p": 0.05},
    {"min_tokens": 6},
    {"temperature": 0.0, "top_k": 3},
]


def plain_distribution(logits: torch.Tensor, params: SamplingParams, drawn: int) -> torch.Tensor:
    """One row, written down as plainly as it can be: float64 probabilities, (vocabulary,)."""
    logits = logits.double().clone()
    if drawn + 1 < params.min_tokens:
        logits[EOS] = -torch.inf
    if params.temperature == 0:
        return logits.softmax(-1)
    weights = (logits / params.temperature).softmax(-1)
    order = weights.argsort(descending=True)
    if params.top_k:
        weights[order[params.top_k :]] = 0
        weights = weights / weights.sum()
    reached = 0.0
    for token in order.tolist():
        if reached >= params.top_p:
            weights[token] = 0
        reached += float(weights[token])
    weights = weights / weights.sum()
    weights[weights < params.min_p * weights.max()] = 0
    return weights / weights.sum()


def plain_log_probs(model: Any, prompt: list[int], tokens: tuple[int, ...], params: SamplingParams) -> list[float]:
    """Teacher-forced."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + list(tokens)])).logits[0, len(prompt) - 1 : -1]
    return [
        float(plain_distribution(row, params, drawn)[token].log())
        for drawn, (row, token) in enumerate(zip(logits, tokens, strict=True))
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_transformers_generate(family: str, make_engine: Any) -> None:
    model = tiny(family)
    rows = prompts(7)
    longest = max(map(len, rows))
    padded = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    expected = model.generate(
        padded, attention_mask=mask, do_sample=False, max_new_tokens=12, pad_token_id=0, eos_token_id=EOS
    )[:, longest:].tolist()
    requests = [request(row, str(place), temperature=0, max_tokens=12) for place, row in enumerate(rows)]
    for (got,), wanted in zip(make_engine(model).generate_batch(requests), expected, strict=True):
        if EOS in wanted:
            wanted = wanted[: wanted.index(EOS) + 1]
        assert list(got.token_ids) == wanted
        assert got.finish_reason == ("stop" if wanted[-1] == EOS else "length")


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_equal_a_teacher_forced_forward(family: str, make_engine: Any) -> None:
    model = tiny(family)
    rows = prompts(len(SETTINGS))
    requests = [
        request(row, str(place), seeds=range(3), max_tokens=10, **params)
        for place, (row, params) in enumerate(zip(rows, SETTINGS, strict=True))
    ]
    for asked, completions in zip(requests, make_engine(model).generate_batch(requests), strict=True):
        for got in completions:
            expected = plain_log_probs(model, list(asked.prompt_token_ids), got.token_ids, asked.sampling)
            assert got.log_probs == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("params", SETTINGS[:6], ids=str)
def test_tokens_follow_the_distribution(params: dict[str, Any], make_engine: Any) -> None:
    """Chi-square over the pairs of the first two tokens, so that the tokens of a sample are independent too."""
    vocabulary, samples = 6, 3000
    model = tiny(vocabulary=vocabulary, eos_token_id=None)
    engine = make_engine(model, max_batch_sequences=samples)
    asked = request([4, 3], seeds=range(samples), max_tokens=2, ignore_eos=True, **params)
    (completions,) = engine.generate_batch([asked])
    observed = torch.zeros(vocabulary, vocabulary)
    for got in completions:
        observed[got.token_ids] += 1

    with torch.no_grad():
        rows = torch.tensor([[4, 3, token] for token in range(vocabulary)])
        logits = model(rows).logits
    first = plain_distribution(logits[0, 1], asked.sampling, 0)
    second = torch.stack([plain_distribution(row[2], asked.sampling, 1) for row in logits])
    expected = (first[:, None] * second * samples).float()
    assert not observed[expected == 0].any()
    cells = expected > 5
    rest = torch.tensor([expected[~cells].sum(), observed[~cells].sum()])
    statistic = float(((observed - expected)[cells] ** 2 / expected[cells]).sum())
    statistic += float((rest[1] - rest[0]) ** 2 / rest[0]) if rest[0] > 5 else 0.0
    freedom = int(cells.sum())
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5


@settings(max_examples=200, deadline=None)
@given(
    weights=st.lists(st.sampled_from([0.0, 1e-38, 1e-7, 0.3, 1.0]), min_size=1, max_size=150).filter(any),
    uniform=st.floats(0, 1, exclude_max=True),
)
def test_inverse_is_the_first_token_above_and_never_one_without_probability(
    weights: list[float], uniform: float
) -> None:
    probabilities = torch.tensor([weights])
    probabilities = probabilities / probabilities.sum()
    token = int(invert(probabilities, torch.tensor([uniform], dtype=torch.float64)))
    assert probabilities[0, token] > 0
    cumulated = probabilities[0].double().cumsum(0)
    assert cumulated[token] >= uniform * cumulated[-1] - 1e-6
    assert token == 0 or cumulated[token - 1] <= uniform * cumulated[-1] + 1e-6


@pytest.mark.parametrize("uniform", [0.0, 1 - 2.0**-53])
def test_inverse_at_the_ends(uniform: float) -> None:
    probabilities = torch.zeros(2, 200)
    probabilities[:, 70], probabilities[:, 130] = 0.25, 0.75
    tokens = invert(probabilities, torch.full((2,), uniform, dtype=torch.float64))
    assert tokens.tolist() == [70 if uniform == 0 else 130] * 2


def test_random_numbers_are_uniform_and_depend_on_all_bits() -> None:
    keys = stream_keys(range(-500, 500), torch.device("cpu"))
    numbers = torch.stack([uniforms(keys, torch.full_like(keys, index)) for index in range(50)])
    assert 0 <= float(numbers.min()) and float(numbers.max()) < 1
    assert len(numbers.unique()) == numbers.numel()
    counts = torch.histc(numbers.float(), bins=100, min=0, max=1)
    assert float(((counts - 500) ** 2 / 500).sum()) < 99 + 4 * 198**0.5
    assert abs(float(torch.corrcoef(numbers[:2])[0, 1])) < 0.1
    big = stream_keys([1, 1 | 1 << 63, (1 << 64) - 1, -1], torch.device("cpu")).tolist()
    assert len(set(big)) == 3 and big[2] == big[3]


def test_logits_that_are_not_finite_are_an_error(make_engine: Any) -> None:
    model = tiny()
    with torch.no_grad():
        model.lm_head.weight[3, 0] = torch.nan
    with pytest.raises(NonFiniteError, match="not finite"):
        one(make_engine(model), [5, 6])


def test_temperature_zero_tells_the_probability_of_the_plain_softmax(make_engine: Any) -> None:
    model = tiny()
    got = one(make_engine(model), [5, 6], temperature=0, max_tokens=1)
    with torch.no_grad():
        expected = model(torch.tensor([[5, 6]])).logits[0, -1].log_softmax(-1)
    assert got.token_ids == (int(expected.argmax()),)
    assert got.log_probs == pytest.approx((float(expected.max()),), abs=1e-5)
