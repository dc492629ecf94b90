"""Weights get from the trainer to the rollout of one process, or an error says why not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import hybrid_rig as rig
import pytest
import torch

from drivetrain import RunError, UserError, WeightStreamError
from drivetrain.weights import WeightEntry, WeightStream
from drivetrain_hybrid_engine.delivery import SAMPLE, sample

PROMPTS = [(5, 6, 7), (9, 8, 7), (30, 31, 40)]


@pytest.mark.parametrize("bucket_bytes", [1, 5000, 2**28])
def test_the_rollout_has_the_trainers_weights_before_and_after_updates(model: Path, bucket_bytes: int) -> None:
    pair = rig.Pair(model, sharing="never", bucket_bytes=bucket_bytes)
    start = None
    for version in range(3):
        metrics = pair.hybrid.enter_generation(version)
        held = pair.held()
        rig.assert_same(held, pair.trained())
        tied = held["lm_head.weight"].equal(held["model.embed_tokens.weight"])
        assert tied == pair.backend.model.config.tie_word_embeddings
        sizes = [t.numel() * 4 for name, t in held.items() if not (tied and name == "lm_head.weight")]
        assert metrics.keys() == {"bytes", "buckets", "seconds", "bandwidth", "peak_bytes"}
        assert metrics["bytes"] == sum(sizes) and metrics["bandwidth"] > metrics["bytes"] / metrics["seconds"]
        assert metrics["peak_bytes"] >= 0
        fewest = {1: len(sizes), 5000: sum(sizes) // 5000, 2**28: 1}[bucket_bytes]
        most = {1: len(held), 5000: len(sizes) - 1, 2**28: 1}[bucket_bytes]
        assert fewest <= metrics["buckets"] <= most
        batch, mismatch = pair.mismatch(PROMPTS)
        assert mismatch < 1e-5
        assert pair.rollout.weight_version == version
        assert start is None or not held[rig.NORM].equal(start[rig.NORM])
        start = held
        pair.hybrid.enter_training()
        pair.update(batch)
    assert pair.mismatch(PROMPTS)[1] > 1e-3  # the tolerance tells: an update that was not sent shows


def test_nothing_moves_where_the_rollout_is_up_to_date(model: Path) -> None:
    pair = rig.Pair(model, sharing="never")
    assert pair.hybrid.enter_generation(4)["buckets"] == 1
    assert pair.hybrid.enter_generation(4) == {}
    assert pair.hybrid.enter_generation(5)["buckets"] == 1


def test_a_trainer_that_was_loaded_is_sent_at_version_zero(model: Path, tmp_path: Path) -> None:
    """A run that only answers prompts loads a checkpoint and has made no update."""
    first = rig.Pair(model, sharing="never")
    first.hybrid.enter_generation(0)
    first.update(first.mismatch(PROMPTS)[0])
    first.backend.save(tmp_path)
    second = rig.Pair(model, sharing="never")
    second.backend.load(tmp_path)
    second.hybrid.enter_generation(0)
    rig.assert_same(second.held(), first.trained())


@pytest.mark.parametrize("sharing", ["auto", "always"])
def test_one_module_serves_both_in_one_process(sharing: str, model: Path) -> None:
    pair = rig.Pair(model, sharing=sharing)
    assert pair.hybrid.shares
    for version in range(2):
        assert pair.hybrid.enter_generation(version) == {"bytes": 0, "buckets": 0, "seconds": 0}
        assert pair.rollout._module is pair.backend.model and pair.rollout.weight_version == version
        batch, mismatch = pair.mismatch(PROMPTS)
        assert mismatch < 1e-5
        assert pair.hybrid.enter_training() == {}
        pair.update(batch)


def only(name: str, change: rig.Entries) -> rig.Entries:
    return lambda entry: change(entry) if entry.name == name else [entry]


def with_tensor(entry: WeightEntry, tensor: torch.Tensor, **changes: Any) -> list[WeightEntry]:
    return [replace(entry, _tensor=tensor, **changes)]


BROKEN: dict[str, tuple[rig.Entries, str]] = {
    "missing": (only(rig.NORM, lambda e: []), "1 weights were not sent, first 'model.norm.weight'"),
    "doubled": (only(rig.NORM, lambda e: [e, e]), "'model.norm.weight' was sent twice"),
    "unknown": (only(rig.NORM, lambda e: [e, replace(e, name="extra")]), "'extra' was sent, but"),
    "shape": (only(rig.NORM, lambda e: with_tensor(e, e.tensor[:1], shape=(1,))), r"shape \(1,\); expected \(32,\)"),
    "tensor of another shape": (only(rig.NORM, lambda e: with_tensor(e, e.tensor[:1])), r"came is .* shape \(1,\)"),
    "dtype": (
        only(rig.NORM, lambda e: with_tensor(e, e.tensor.bfloat16(), dtype=torch.bfloat16)),
        "'model.norm.weight' was sent as torch.bfloat16; expected torch.float32",
    ),
    "tensor of another dtype": (only(rig.NORM, lambda e: with_tensor(e, e.tensor.half())), "came is torch.float16"),
    "content": (rig.flipped, "'model.norm.weight' did not arrive as it left: the fingerprints differ"),
    "fingerprint": (only(rig.NORM, lambda e: [replace(e, fingerprint=None)]), "fingerprints differ"),
}


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize("first", [True, False])
def test_a_wrong_stream_is_refused_and_leaves_the_rollout_unusable(kind: str, first: bool, model: Path) -> None:
    pair = rig.Pair(model, sharing="never", bucket_bytes=5000, fingerprint="always")
    good = pair.hybrid.transport
    if not first:
        pair.hybrid.enter_generation(0)
    change, message = BROKEN[kind]
    pair.hybrid.transport = rig.Faulty(change)
    for _ in range(2):  # it is not taken for up to date either
        with pytest.raises(WeightStreamError, match=message):
            pair.hybrid.enter_generation(1)
        with pytest.raises(RunError, match="no usable weights: the load of weights of version 1"):
            pair.generate(PROMPTS)
    pair.hybrid.transport = good
    pair.hybrid.enter_generation(1)
    assert pair.mismatch(PROMPTS)[1] < 1e-5


@pytest.mark.parametrize("fingerprint, refused", [("first", [True, False]), ("always", [True, True]),
                                                  ("never", [False, False])])  # fmt: skip
def test_when_contents_are_compared(fingerprint: str, refused: list[bool], model: Path) -> None:
    for version, raises in enumerate(refused):
        pair = rig.Pair(model, sharing="never", fingerprint=fingerprint)
        if version:
            pair.hybrid.enter_generation(0)
        pair.hybrid.transport = rig.Faulty(rig.flipped)
        if raises:
            with pytest.raises(WeightStreamError, match="fingerprints differ"):
                pair.hybrid.enter_generation(version)
        else:
            assert pair.hybrid.enter_generation(version)["buckets"] == 1


def test_a_sample_comes_to_every_weight(models: dict[str, Path]) -> None:
    """All at first; later one sync in sixteen finds a change of one weight, and the one after compares all again."""
    pair = rig.Pair(models["untied"], sharing="never")
    good, faulty = pair.hybrid.transport, rig.Faulty(rig.flipped)
    assert pair.hybrid.config.fingerprint == "sampled"
    pair.hybrid.transport = faulty
    with pytest.raises(WeightStreamError, match="fingerprints differ"):
        pair.hybrid.enter_generation(0)
    pair.hybrid.transport = good
    pair.hybrid.enter_generation(0)
    pair.hybrid.transport = faulty
    found = []
    for version in range(1, 1 + SAMPLE):
        try:
            pair.hybrid.enter_generation(version)
        except WeightStreamError:
            found.append(version)
            with pytest.raises(WeightStreamError, match="fingerprints differ"):
                pair.hybrid.enter_generation(version)
            break
    assert found
    names = pair.held()
    sizes = [sum(map(sample(number), names)) for number in range(SAMPLE)]
    assert sum(sizes) == len(names) and max(sizes) < len(names) / 2


def test_all_weights_that_changed_are_named(model: Path) -> None:
    pair = rig.Pair(model, sharing="never", bucket_bytes=2**28)
    pair.hybrid.transport = rig.Faulty(lambda e: [e] if e.alias else with_tensor(e, -e.tensor))
    with pytest.raises(WeightStreamError, match="weights 'model.embed_tokens.weight', '.*' and .* did not arrive as"):
        pair.hybrid.enter_generation(0)


LENT_OTHERWISE = {
    "missing": (lambda t: [], "1 weights were not sent"),
    "doubled": (lambda t: [t, t], "sent twice"),
    "shape": (lambda t: [(t[0], t[1][:1], None)], r"shape \(1,\); expected"),
    "integers": (lambda t: [(t[0], t[1].long(), None)], "torch.int64; expected"),
    "precision": (lambda t: [(t[0], t[1].half(), None)], "torch.float16; expected"),
}
# A rollout may hold another precision than the trainer, so the first stream says which is right.
AT_FIRST = [(kind, True) for kind in LENT_OTHERWISE if kind != "precision"]


@pytest.mark.parametrize("kind, first", [*AT_FIRST, *((kind, False) for kind in LENT_OTHERWISE)])
def test_a_trainer_that_lends_something_else(
    kind: str, first: bool, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against what the rollout holds and, from the second sync on, against what came at the first."""
    from drivetrain_backend_fsdp import names

    change, message = LENT_OTHERWISE[kind]
    pair = rig.Pair(model, sharing="never")
    if not first:
        pair.hybrid.enter_generation(0)
    lent = names.entries

    def other(module: Any, *, sharded: bool) -> Iterator[WeightEntry]:
        for entry in lent(module, sharded=sharded):
            if entry.name == rig.NORM:
                yield from (WeightEntry.whole(*triple) for triple in change((entry.name, entry.tensor, None)))
            else:
                yield entry

    monkeypatch.setattr(names, "entries", other)
    with pytest.raises(WeightStreamError, match=message):
        pair.hybrid.enter_generation(1)
    with pytest.raises(RunError, match="no usable weights"):
        pair.generate(PROMPTS)


def test_a_rollout_that_stops_listening(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = rig.Pair(model, sharing="never", bucket_bytes=5000)

    def listen(stream: WeightStream, version: int) -> None:
        next(iter(stream))

    monkeypatch.setattr(pair.rollout, "load_weights", listen)
    with pytest.raises(WeightStreamError, match="'hf' did not take all weights"):
        pair.hybrid.enter_generation(1)


def test_what_is_lent_expires(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the stream has gone through checks and a transport."""
    from drivetrain import ExpiredWeightsError

    pair = rig.Pair(model, sharing="never")
    kept: list[WeightEntry] = []

    def keep(stream: WeightStream, version: int) -> None:
        kept.extend(entry for bucket in stream for entry in bucket.entries)

    monkeypatch.setattr(pair.rollout, "load_weights", keep)
    pair.hybrid.enter_generation(1)
    with pytest.raises(ExpiredWeightsError):
        _ = kept[0].tensor


def test_engines_that_can_only_share_are_refused_over_ranks(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from drivetrain_hybrid_engine import colocated
    from drivetrain_hybrid_engine.config import SHARED, ColocatedConfig

    pair = rig.Pair(model)
    monkeypatch.setattr(colocated, "offered", lambda *names: SHARED)
    monkeypatch.setattr(pair.backend, "context", replace(pair.backend.context, world_size=2))
    with pytest.raises(UserError, match="with 2 processes .* backend.weights and rollout.load_weights is not there"):
        colocated.Colocated(ColocatedConfig()).attach(pair.backend, pair.rollout)
