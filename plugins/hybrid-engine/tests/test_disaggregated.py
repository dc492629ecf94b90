"""Two groups that meet: who sends to whom, what is checked, and that a failure on one rank is one on all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import apart_rig
import hybrid_rig
import pytest
import torch
from apart_rig import OnTheWay, fakes

from drivetrain import RunError, UserError, WeightStreamError, get_registry
from drivetrain.weights import WeightEntry
from drivetrain_hybrid_engine import disaggregated
from drivetrain_hybrid_engine.disaggregated import Disaggregated, senders
from drivetrain_hybrid_engine.disaggregated_config import SAME_DEVICE, DisaggregatedConfig


@pytest.fixture(autouse=True)
def address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")


@pytest.fixture
def offers(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, tuple[str, ...]]]:
    """What plugins provide besides their capabilities, by name."""
    more: dict[str, tuple[str, ...]] = {}
    registry = get_registry()

    class Registry:
        def find(self, hook: str, name: str) -> Any:
            found = registry.find(hook, name)
            if name not in more:
                return found
            return replace(found, spec=replace(found.spec, provides=(*found.spec.provides, *more[name])))

        select = find

    monkeypatch.setattr(disaggregated, "get_registry", Registry)
    yield more


def test_all_rollouts_have_the_trainers_weights_after_each_update(models: dict[str, Path]) -> None:
    from drivetrain_rollout_hf.engine import HFRollout

    pair = hybrid_rig.Pair(models["tied"])
    rollouts = [HFRollout(pair.rollout.config, replace(pair.rollout.context, rank=n, world_size=2)) for n in range(2)]
    groups = apart_rig.Groups([pair.backend], rollouts, bucket_bytes=5000)
    assert groups.said == ["weights by gloo"] * 3
    for rollout in rollouts:
        rollout.initialize()
        rollout._own_or_attached()  # here, for transformers cannot load in several threads at once
    for version in range(3):
        sent, *received = groups.generate(version)
        trained = pair.trained()
        size = sum(t.nbytes for name, t in trained.items() if name != "lm_head.weight")
        every = {"seconds", "peak_bytes"}
        assert sent.keys() == every | {"bytes", "buckets", "bandwidth"}
        assert sent["bytes"] == size and sent["buckets"] > 1
        assert all(metrics.keys() == every for metrics in received)
        for rollout in rollouts:
            hybrid_rig.assert_same(dict(rollout._module.state_dict()), trained)
            assert rollout.weight_version == version
        assert groups.generate(version) == [{}, {}, {}]
        assert groups.train() == [{}, {}, {}]
        pair.rollout.weight_version = version
        pair.update(pair.mismatch([(5, 6, 7), (9, 8, 7)])[0])
    assert not rollouts[0]._module.state_dict()[hybrid_rig.NORM].equal(pair.trained()[hybrid_rig.NORM])


def test_one_rank_sends_and_the_others_take_part_in_gathering() -> None:
    groups = fakes("ab", "ccd")
    sent, gathered, *received = groups.generate(7)
    assert sent["bytes"] == 3 * 16 and gathered["bytes"] == 0 and len(received) == 3
    assert [trainer.drawn for trainer in groups.trainers] == [3, 3]
    for rollout in groups.rollouts:
        assert rollout.held.keys() == set(apart_rig.NAMES) and float(rollout.held["norm"][0]) == 0
        assert rollout.calls == [("load", 7)]


def test_ranks_of_a_device_meet_where_the_transport_stays_on_it(offers: dict[str, Any]) -> None:
    offers["gloo"] = (SAME_DEVICE,)
    groups = fakes("abc", "bacb")
    moved = groups.generate(0)
    assert [metrics.get("bytes") for metrics in moved] == [48, 48, 48, None, None, None, None]
    assert [float(rollout.held["norm"][0]) for rollout in groups.rollouts] == [10, 0, 20, 10]


def test_a_rollout_without_a_trainer_on_its_device(offers: dict[str, Any]) -> None:
    offers["gloo"] = (SAME_DEVICE,)
    found = fakes("a", "ab", meet=False).meet()
    assert all(isinstance(error, UserError) for error in found)
    assert "rollout rank 1 is on a device that no actor rank is on" in str(found[0])


@pytest.mark.parametrize("trainers, rollouts, same, chosen", [
    ("ab", "cd", False, [0, 0]), ("ab", "ba", True, [1, 0]), ("aab", "aaab", True, [0, 1, 0, 2]),
])  # fmt: skip
def test_who_sends_to_whom(trainers: str, rollouts: str, same: bool, chosen: list[int]) -> None:
    assert senders(list(trainers), list(rollouts), same_device=same) == chosen


def test_an_unknown_transport_and_hardware_without_one(offers: dict[str, Any]) -> None:
    groups = fakes(meet=False)
    for engine in groups.engines:
        engine._hardware.communication_backend = "smoke"
    assert "unknown weight transport 'smoke'" in str(groups.meet()[0])
    mixed = fakes(meet=False)
    mixed.engines[0]._hardware.communication_backend = "smoke"
    assert "different hardware (cpu with gloo and cpu with smoke)" in str(mixed.meet()[1])


def test_a_device_that_both_groups_are_on_takes_another_way() -> None:
    ends = [disaggregated.End(size=1, device="0", device_type="cuda", communication_backend="nccl", sleeps=False)]
    engine = Disaggregated(DisaggregatedConfig())
    assert engine._chosen(ends, shared=True) == "ipc" and engine._chosen(ends, shared=False) == "nccl"


def test_both_engines_in_one_worker_are_refused() -> None:
    place = apart_rig.context(0, 1)
    with pytest.raises(UserError, match="actor and rollout are in one worker"):
        Disaggregated(DisaggregatedConfig()).attach(apart_rig.Trainer(place), apart_rig.Rollout(place))  # type: ignore


def only(name: str, change: Any) -> Any:
    return lambda entry: change(entry) if entry.name == name else [entry]


def flipped(entry: WeightEntry) -> list[WeightEntry]:
    return [replace(entry, _tensor=entry.tensor + 1)]


BROKEN = {
    "missing": (only("last", lambda e: []), "1 weights were not sent, first 'last'"),
    "doubled": (only("norm", lambda e: [e, e]), "'norm' was sent twice"),
    "unknown": (only("norm", lambda e: [e, replace(e, name="extra")]), "'extra'"),
    "shape": (only("norm", lambda e: [replace(e, shape=(2, 2), _tensor=e.tensor.view(2, 2))]), "'norm'"),
    "dtype": (only("norm", lambda e: [replace(e, dtype=torch.half, _tensor=e.tensor.half())]), "'norm'"),
    "content": (only("norm", flipped), "'norm' did not arrive as it left: the fingerprints differ"),
}  # fmt: skip


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("kind", BROKEN)
def test_what_is_wrong_on_one_rank_fails_all_and_the_next_sync_is_whole(kind: str, first: bool) -> None:
    groups = fakes("ab", "cd", fingerprint="always", bucket_bytes=16)
    if not first:
        groups.generate(0)
    change, said = BROKEN[kind]
    broken = groups.engines[3]
    good, broken.transport = broken.transport, OnTheWay(broken.transport, change)  # type: ignore[assignment]
    for _ in range(2):  # it is not taken for up to date either
        *others, own = groups.generate(1)
        assert isinstance(own, WeightStreamError) and said in str(own)
        for error in others:
            assert isinstance(error, WeightStreamError)
            assert str(error).startswith("weights did not get to every rollout; rollout rank 1: WeightStreamError: ")
            assert said in str(error)
    broken.transport = good
    assert all(isinstance(metrics, dict) for metrics in groups.generate(1))


@pytest.mark.parametrize("change, said", [
    (only("norm", lambda e: [replace(e, name="extra")]), "'extra' came as torch.float32 .* it was sent not at all"),
    (only("norm", lambda e: [replace(e, shape=(2, 2), _tensor=e.tensor.view(2, 2))]), r"\(2, 2\); it was sent as"),
])  # fmt: skip
def test_the_first_sync_is_held_against_what_left(change: Any, said: str) -> None:
    groups = fakes(fingerprint="never")
    groups.engines[1].transport = OnTheWay(groups.engines[1].transport, change)  # type: ignore[assignment]
    with pytest.raises(WeightStreamError, match=said):
        raise groups.generate(0)[1]


@pytest.mark.parametrize("fingerprint, refused", [("first", [True, False]), ("always", [True, True]),
                                                  ("never", [False, False])])  # fmt: skip
def test_when_contents_are_compared(fingerprint: str, refused: list[bool]) -> None:
    for version, raises in enumerate(refused):
        groups = fakes(fingerprint=fingerprint)
        if version:
            groups.generate(0)
        engine = groups.engines[1]
        engine.transport = OnTheWay(engine.transport, only("norm", flipped))  # type: ignore[assignment]
        assert isinstance(groups.generate(version)[1], WeightStreamError) == raises


def test_a_trainer_that_fails_ends_every_stream() -> None:
    groups = fakes("ab", "cd", bucket_bytes=16)
    for trainer in groups.trainers:
        trainer.fails = True
    own, other, *received = groups.generate(0)
    assert isinstance(own, ArithmeticError) and isinstance(other, ArithmeticError)
    for error in received:
        assert isinstance(error, WeightStreamError)
        assert str(error) == "the sending side failed: ArithmeticError: no luck"
    for trainer in groups.trainers:
        trainer.fails = False
    assert all(isinstance(metrics, dict) for metrics in groups.generate(0))


def test_a_rank_that_only_gathers_fails_the_sync() -> None:
    groups = fakes("ab", "c")
    groups.trainers[1].fails = True
    sent, own, received = groups.generate(0)
    assert isinstance(own, ArithmeticError)
    for error in (sent, received):
        assert str(error) == "weights did not get to every rollout; actor rank 1: ArithmeticError: no luck"


def test_a_rollout_that_stops_listening() -> None:
    groups = fakes("a", "bc", bucket_bytes=16)
    groups.rollouts[0].load_weights = lambda stream, version: next(iter(stream))
    sent, own, other = groups.generate(0)
    assert "rollout 'hf' did not take all weights" in str(own)
    assert "rollout 'hf' did not take all weights" in str(sent) and isinstance(other, WeightStreamError)


def test_a_receiver_that_is_gone() -> None:
    groups = fakes("a", "b")
    transport = groups.engines[1].transport
    groups.engines[1].transport = None
    del transport._group, transport  # type: ignore[union-attr]
    with pytest.raises(RunError, match="a process of the meeting is gone, or late"):
        groups.engines[0].enter_generation(0)


def test_rollouts_sleep_where_trainers_share_their_devices(offers: dict[str, Any]) -> None:
    offers["hf"] = ("rollout.sleep",)
    groups = fakes("ab", "ab")
    groups.generate(0)
    groups.train()
    groups.train()
    assert groups.generate(0)[0]["buckets"] == 1  # weights that slept have to come again
    for rollout in groups.rollouts:
        assert rollout.calls == [
            ("load", 0), ("sleep", "weights", "kv_cache"), ("wake", "weights"), ("load", 0), ("wake", "kv_cache")
        ]  # fmt: skip
    apart = fakes("ab", "cd")
    apart.generate(0)
    apart.train()
    assert apart.generate(0) == [{}, {}, {}, {}]
    assert apart.rollouts[0].calls == [("load", 0)]
