"""From prompts to requests, and from completions to rows."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from drivetrain.config import RolloutConfig
from drivetrain.contracts.rollout import Completion, GenerationRequest
from drivetrain.errors import NonFiniteError
from drivetrain.protocol import DataProto
from drivetrain.workers.generation import completions_to_batch, requests_of

CONFIG = RolloutConfig(name="any", max_response_tokens=4, temperature=0.7, top_k=3, stop=("x",), min_response_tokens=1)
PAD = 9


def prompts(order: str = "abc", **meta: Any) -> DataProto:
    tokens = {"a": [9, 9, 5], "b": [9, 6, 7], "c": [9, 9, 9, 8][1:]}
    masks = {"a": [0, 0, 1], "b": [0, 1, 1], "c": [0, 1, 1]}  # the padding token may stand in a prompt
    return DataProto.from_single_dict(
        {"input_ids": torch.tensor([tokens[uid] for uid in order]), "uid": list(order), "answer": list(order.upper()),
         "attention_mask": torch.tensor([masks[uid] for uid in order])}, meta,
    )  # fmt: skip


def requests(*args: str, seed: int = 1, **meta: Any) -> list[GenerationRequest]:
    return requests_of(prompts(*args, **meta), CONFIG, seed=seed)


def by_uid(made: list[GenerationRequest], order: str) -> dict[str, tuple[int, ...]]:
    return {uid: request.seeds for uid, request in zip(order, made, strict=True)}


def test_left_padding_is_removed() -> None:
    assert [request.prompt_token_ids for request in requests()] == [(5,), (6, 7), (9, 8)]


def test_requests_say_how_to_sample() -> None:
    sampling = requests()[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.max_tokens, sampling.min_tokens) == (0.7, 3, 4, 1)
    assert sampling.stop == ("x",) and requests(temperature=0.0)[0].sampling.temperature == 0.0
    assert len({request.request_id for request in requests("aab")}) == 3


def test_seeds_do_not_depend_on_order_or_company() -> None:
    everyone = by_uid(requests(samples=3), "abc")
    assert by_uid(requests("cab", samples=3), "cab") == everyone
    assert by_uid(requests("b", samples=3), "b") == {"b": everyone["b"]}
    assert by_uid(requests(samples=2), "abc") == {uid: seeds[:2] for uid, seeds in everyone.items()}


def test_seeds_differ_in_everything_that_should_matter() -> None:
    kinds = ({}, {"step": 1}, {"step": 2}, {"seed": 2})
    drawn = [seed for kind in kinds for request in requests(samples=5, **kind) for seed in request.seeds]
    assert len(set(drawn)) == len(drawn) == 60
    assert all(0 <= seed < 2**63 for seed in drawn)


def test_seeds_are_the_same_on_every_machine() -> None:
    # int.from_bytes(blake2b(b"1/0/a/0", digest_size=8).digest(), "little") >> 1
    assert requests("a")[0].seeds == (323564176890913090,)


def completion(sample: int, *tokens: int, reason: Any = "stop", version: int = 3) -> Completion:
    return Completion(request_id="", sample=sample, token_ids=tokens, log_probs=tuple(-0.5 * t for t in tokens),
                      finish_reason=reason, weight_versions=((0, 0), (1, version)))  # fmt: skip


def joined() -> DataProto:
    drawn = [[completion(0, 5, 2), completion(1)], [completion(0, 1, 2, 3, 4, reason="length"), completion(1, 9)]]
    return completions_to_batch(prompts("ab", samples=2), drawn, CONFIG, pad_token_id=PAD)


def test_rows_of_completions() -> None:
    batch = joined()
    assert batch["responses"].tolist() == [[5, 2, 9, 9], [9, 9, 9, 9], [1, 2, 3, 4], [9, 9, 9, 9]]
    assert batch["response_mask"].tolist() == [[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]]
    assert batch["rollout_log_probs"].tolist() == [[-2.5, -1, 0, 0], [0] * 4, [-0.5, -1, -1.5, -2], [-4.5, 0, 0, 0]]
    assert batch["prompts"].tolist() == [[9, 9, 5]] * 2 + [[9, 6, 7]] * 2
    assert batch["input_ids"].equal(torch.cat([batch["prompts"], batch["responses"]], dim=1))
    assert batch["attention_mask"].tolist()[0] == [0, 0, 1, 1, 1, 0, 0]
    assert batch["uid"].tolist() == list("aabb") and batch["answer"].tolist() == list("AABB")
    assert batch["sample_index"].tolist() == [0, 1, 0, 1]
    assert batch["finish_reason"].tolist() == ["stop", "stop", "length", "stop"]
    assert batch["weight_version"].tolist() == [3] * 4  # the newest that had a part in it


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_log_probs_that_are_not_finite_are_refused(bad: float) -> None:
    good, broken = completion(0, 5), dataclasses.replace(completion(0, 5, 2), log_probs=(-0.5, bad))
    with pytest.raises(NonFiniteError, match="log-probs of 1 of 2 completions are not finite"):
        completions_to_batch(prompts("ab"), [[good], [broken]], CONFIG, pad_token_id=PAD)


def test_types_of_columns() -> None:
    batch = joined()
    integers = ("prompts", "responses", "input_ids", "attention_mask", "response_mask")
    assert {batch[name].dtype for name in integers} == {torch.int64}
    assert batch["rollout_log_probs"].dtype == torch.float32
    assert batch["sample_index"].dtype == batch["weight_version"].dtype == np.int64


def test_a_rank_without_prompts_returns_rows_that_join_those_of_others() -> None:
    nothing = prompts("ab", samples=2)[:0]
    assert requests_of(nothing, CONFIG, seed=1) == []
    empty = completions_to_batch(nothing, [], CONFIG, pad_token_id=PAD)
    assert len(empty) == 0 and DataProto.concat([empty, joined()]).equal(joined())
