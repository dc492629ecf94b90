"""Tokens and log-probs are those of transformers' with the same weights: at first, after updates, after sleep."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rig_vllm import ATOL, EOS, Sent, Served, furthest, greedy, prompts, request, weights_of

from drivetrain import RunError, WeightStreamError
from drivetrain.weights import Bucket, Placement, WeightEntry

SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.7, "top_k": 5},
    {"top_p": 0.7},
    {"min_p": 0.2},
    {"temperature": 1.3, "top_k": 9, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 9, "top_p": 0.8, "min_p": 0.05},
    {"top_p": 0.6, "min_p": 0.1},
    {"min_tokens": 9},
    {"temperature": 0.0, "top_k": 3},
]


def assert_serves(served: Served, version: int) -> None:
    """Every setting in one batch, and greedy tokens, with the weights that were sent last."""
    rows = prompts(len(SETTINGS))
    asked = [
        request(row, str(at), range(3), max_tokens=16, **settings)
        for at, (row, settings) in enumerate(zip(rows, SETTINGS, strict=True))
    ]
    got = served.engine.generate_batch(asked)
    assert furthest(served.model, asked, got) < ATOL
    assert {c.weight_versions for group in got for c in group} == {((0, version),)}
    for row in rows:
        (said,) = served.draw(row, max_tokens=16, temperature=0)
        assert list(said.token_ids) == greedy(served.model, row, 16)
        assert said.finish_reason == ("stop" if said.token_ids[-1] == EOS else "length")


def test_tokens_and_log_probs_before_and_after_updates(served: Served) -> None:
    before = [served.draw(row, max_tokens=16, temperature=0) for row in prompts(9)]
    assert_serves(served, 1)
    for version in (2, 3):
        served.load(version, version)
        assert served.engine.weight_version == version
        assert_serves(served, version)
    after = [served.draw(row, max_tokens=16, temperature=0) for row in prompts(9)]
    assert sum(a[0].token_ids != b[0].token_ids for a, b in zip(before, after)) > 4


@pytest.mark.parametrize("settings", [{"temperature": 0.6}, {"top_k": 4}, {"top_p": 0.6}, {"min_p": 0.1}], ids=str)
def test_tokens_follow_the_distribution(settings: dict[str, Any], llama: Served) -> None:
    """Chi-square of the first token over many seeds, and none that is cut off."""
    from rig_vllm import plain_distribution

    count = 2000
    asked = request([7, 40], "r", range(count), max_tokens=1, **settings)
    (got,) = llama.engine.generate_batch([asked])
    observed = torch.bincount(torch.tensor([c.token_ids[0] for c in got]), minlength=128).double()
    with torch.no_grad():
        logits = llama.model(torch.tensor([[7, 40]])).logits[0, -1]
    expected = plain_distribution(logits, asked.sampling, 0) * count
    assert not observed[expected == 0].any()
    cells = expected > 5
    rest = expected[~cells].sum(), observed[~cells].sum()
    statistic = float(((observed - expected)[cells] ** 2 / expected[cells]).sum())
    statistic += float((rest[1] - rest[0]) ** 2 / rest[0]) if rest[0] > 5 else 0.0
    freedom = int(cells.sum())
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5


def test_prompts_that_begin_alike_are_read_once_and_forgotten_when_weights_change(served: Served) -> None:
    long = [3 + at * at % 120 for at in range(300)]
    asked = request(long, "r", range(8), max_tokens=4)

    def read() -> int:
        with served.tokens_read() as seen:
            got = served.engine.generate_batch([asked])
        assert furthest(served.model, [asked], got) < ATOL
        return sum(seen)

    first, again = read(), read()
    assert first < 8 * 300 / 2, "the samples of a prompt share it"
    assert again < first - 200, "a prompt that was seen before is not read again"
    served.load(1, 2)
    assert read() > again + 200, "with other weights it is"


def test_sleeping_and_waking(served: Served) -> None:
    engine = served.engine
    engine.sleep()
    for _ in range(2):
        with pytest.raises(RunError, match="cannot generate: its weights were dropped"):
            served.draw([5])
    engine.wake(("weights",))
    served.load(2, 7)
    with pytest.raises(RunError, match="cannot generate: it sleeps"):
        served.draw([5])
    engine.wake(("kv_cache",))
    assert_serves(served, 7)
    engine.wake()
    assert_serves(served, 7)
    with pytest.raises(RunError, match="kv_cache and weights together"):
        engine.sleep(("kv_cache",))
    assert_serves(served, 7)


def test_weights_that_sleep_in_host_memory_come_back_by_themselves(llama: Served, monkeypatch: Any) -> None:
    kept = llama.engine.config.model_copy(update={"sleep_level": 1})
    monkeypatch.setattr(llama.engine, "config", kept)
    llama.engine.sleep()
    with pytest.raises(RunError, match="it sleeps"):
        llama.draw([5])
    llama.engine.wake()
    assert_serves(llama, 1)


def without(sent: Sent, name: str) -> Sent:
    return [entry for entry in sent if entry[0] != name]


NORM = "model.norm.weight"
BROKEN = {
    "missing": (lambda sent: without(sent, NORM), "1 weights were not sent, first 'model.norm.weight'"),
    "doubled": (lambda sent: [*sent, (NORM, torch.ones(64), None)], "'model.norm.weight' was sent twice"),
    "unknown": (lambda sent: [*sent, ("model.extra", torch.ones(1), None)], "no such weight"),
    "shape": (lambda sent: [*without(sent, NORM), (NORM, torch.ones(63), None)], r"shape \(63,\); expected \(64,\)"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_after_a_load_that_failed_nothing_is_generated_until_one_succeeds(kind: str, served: Served) -> None:
    change, message = BROKEN[kind]
    with pytest.raises(WeightStreamError, match=message):
        served.send(change(weights_of(served.variant(1))), 2)
    assert served.engine.weight_version == 1
    with pytest.raises(RunError, match="cannot generate: the load of weights of version 2 did not succeed"):
        served.draw([5])
    served.load(2, 3)
    assert_serves(served, 3)


@pytest.mark.parametrize("bucket", [{"kind": "adapter"}, {"placement": Placement(dim=0, index=0, count=2)}])
def test_adapters_and_shards_are_refused(bucket: dict[str, Any], llama: Served) -> None:
    entry = WeightEntry(name=NORM, shape=(64,), dtype=torch.float32, _tensor=torch.ones(64),
                        placement=bucket.get("placement", Placement()))  # fmt: skip
    stream: Any = [Bucket(entries=(entry,), kind=bucket.get("kind", "full"))]
    with pytest.raises(WeightStreamError, match="full weights|whole tensors"):
        llama.engine.load_weights(stream, 1)
    llama.load(0)
    assert_serves(llama, 1)
