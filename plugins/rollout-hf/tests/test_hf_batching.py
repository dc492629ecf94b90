"""What is drawn does not depend on what is drawn beside it, and what has ended costs nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tiny_hf import FAMILIES, prompts, request, tiny

from drivetrain import Completion, GenerationRequest


def mixed_requests(count: int = 6) -> list[GenerationRequest]:
    """Ragged prompts, several samples, unlike settings, unlike lengths."""
    options: list[dict[str, Any]] = [
        {"max_tokens": 9}, {"max_tokens": 3, "top_k": 7}, {"max_tokens": 14, "temperature": 0.7},
        {"max_tokens": 12, "top_p": 0.8}, {"max_tokens": 1}, {"max_tokens": 10, "temperature": 0.0},
    ]  # fmt: skip
    return [
        request(prompt, f"r{place}", seeds=(100 * place, 100 * place + 1, 2**63 + place), **options[place % 6])
        for place, prompt in enumerate(prompts(count, seed=3))
    ]


def tokens(batches: list[list[Completion]]) -> dict[tuple[str, int], tuple[int, ...]]:
    return {(got.request_id, got.sample): got.token_ids for batch in batches for got in batch}


@pytest.mark.parametrize("family", FAMILIES)
def test_same_seed_same_tokens_whatever_is_beside_it(family: str, make_engine: Any) -> None:
    model = tiny(family)
    requests = mixed_requests()
    together = tokens(make_engine(model).generate_batch(requests))
    assert len(together) == 18
    alone_engine = make_engine(model)
    alone = [tokens(alone_engine.generate_batch([asked])) for asked in requests]
    assert together == {key: value for part in alone for key, value in part.items()}
    assert together == tokens(make_engine(model).generate_batch(requests[::-1]))
    for most in (1, 4, 9):
        assert together == tokens(make_engine(model, max_batch_sequences=most).generate_batch(requests))


def test_requests_join_while_others_are_under_way(make_engine: Any) -> None:
    """The late prompt is longer than all that has been decoded so far, or much shorter; both have to fit in."""
    model = tiny("qwen2")
    early = [request([5], "a", seeds=(1, 2), max_tokens=30, ignore_eos=True)]
    late = [
        request(list(range(3, 15)), "b", seeds=(3, 4), max_tokens=20, ignore_eos=True),
        request([7, 8], "c", seeds=(5,), max_tokens=40, ignore_eos=True),
    ]
    engine = make_engine(model)
    expected = {key: value for asked in early + late for key, value in tokens(engine.generate_batch([asked])).items()}

    async def samples(asked: GenerationRequest, delay: int) -> list[Completion]:
        for _ in range(delay):
            await asyncio.sleep(0)
        return [got async for got in engine.generate(asked)]

    async def everything() -> list[list[Completion]]:
        return await asyncio.gather(samples(early[0], 0), samples(late[0], 4), samples(late[1], 15))

    sizes = count_rows(model)
    assert tokens(asyncio.run(everything())) == expected
    assert max(sizes) == 5


def count_rows(model: Any) -> list[int]:
    """Rows of each forward call to come."""
    sizes: list[int] = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    return sizes


def test_a_prompt_is_computed_once_and_rows_that_ended_cost_nothing(make_engine: Any) -> None:
    model = tiny()
    engine = make_engine(model)
    sizes = count_rows(model)
    requests = [request(prompt, str(place), seeds=range(8), max_tokens=20) for place, prompt in enumerate(prompts(4))]
    requests.append(request(requests[0].prompt_token_ids, "again", seeds=range(8, 12), max_tokens=20))
    batches = engine.generate_batch(requests)
    lengths = [len(got.token_ids) for batch in batches for got in batch]
    assert min(lengths) < max(lengths)
    assert sizes[0] == 4
    assert sum(sizes[1:]) == sum(length - 1 for length in lengths)


def test_the_cache_grows(make_engine: Any) -> None:
    """More tokens than the slots that are allocated ahead."""
    model = tiny(max_position_embeddings=512)
    engine = make_engine(model)
    (got,), (other,) = engine.generate_batch(
        [
            request([5, 6, 7], "a", max_tokens=400, ignore_eos=True, temperature=0),
            request([8], "b", max_tokens=3, ignore_eos=True, temperature=0),
        ]
    )
    expected = model.generate(input_ids=_ids([5, 6, 7]), do_sample=False, max_new_tokens=400, eos_token_id=None)
    assert list(got.token_ids) == expected[0, 3:].tolist()
    assert len(other.token_ids) == 3


def _ids(row: list[int]) -> Any:
    import torch

    return torch.tensor([row])


def test_samples_of_a_request(make_engine: Any) -> None:
    engine = make_engine(tiny())
    seeds = (4, 4, 9)
    (completions,) = engine.generate_batch([request([5, 6], seeds=seeds, max_tokens=6, ignore_eos=True)])
    assert [got.sample for got in completions] == [0, 1, 2]
    assert completions[0].token_ids == completions[1].token_ids != completions[2].token_ids
    assert all(len(got.token_ids) == len(got.log_probs) == 6 for got in completions)
    assert engine.generate_batch([request([5], seeds=())]) == [[]]
    assert engine.generate_batch([]) == []
