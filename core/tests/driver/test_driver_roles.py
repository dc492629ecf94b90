"""What an algorithm may call, and what workers are told then."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from driver_rig import Group, Prompts, mean, phases

from drivetrain.config import ScheduleConfig
from drivetrain.contracts.algorithm import LossTerm
from drivetrain.driver.phases import Phases
from drivetrain.driver.progress import Progress
from drivetrain.driver.roles import ActorRole, CriticRole, PromptsRole, ReferenceRole, Roles, RolloutRole
from drivetrain.metrics import Mean
from drivetrain.numerics import Counts
from drivetrain.protocol import DataProto

MASK = [[1, 1, 0], [1, 0, 0], [0, 0, 0], [1, 1, 1]]


def batch(uids: str = "abab") -> DataProto:
    return DataProto.from_single_dict({"response_mask": torch.tensor(MASK), "uid": list(uids)})


def actor(group: Group, mini_batch_prompts: int | None = None, step: int = 1) -> ActorRole:
    run = SimpleNamespace(
        actor=SimpleNamespace(mini_batch_prompts=mini_batch_prompts, schedule=ScheduleConfig(name="linear")),
        trainer=SimpleNamespace(seed=3, steps=4),
    )
    return ActorRole(group, phases(), Progress(step=step), run)


@pytest.mark.parametrize("name", ["prompts", "rollout", "ref", "critic", "rewards"])
def test_a_role_that_the_run_lacks_is_named(name: str) -> None:
    roles = Roles(actor=actor(Group()), text=None)
    with pytest.raises(AttributeError, match=rf"no role '{name}'.*roles\(\)"):
        getattr(roles, name)


def test_further_prompts_follow_those_of_the_step() -> None:
    source = Prompts()
    role = Roles(actor=actor(Group()), text=None, prompts=PromptsRole(source)).prompts
    source.next_batch(4)
    assert len(role.draw(3)) == 3 and source.position == 7


def test_mini_batches_are_whole_prompts_in_an_order_of_their_own() -> None:
    rows = DataProto.from_single_dict({"row": torch.arange(12), "uid": [f"p{row % 6}" for row in range(12)]})
    orders = {}
    for step, epoch in ((1, 0), (1, 0), (1, 1), (2, 0)):
        parts = list(actor(Group(), 2, step).mini_batches(rows, epoch))
        assert [sorted(part["row"].tolist()) for part in parts] == [
            sorted(r for r in range(12) if f"p{r % 6}" in part["uid"]) for part in parts
        ]
        assert [len(set(part["uid"])) for part in parts] == [2, 2, 2]
        order = [row for part in parts for row in part["row"].tolist()]
        assert orders.setdefault((step, epoch), order) == order
    assert len({tuple(order) for order in orders.values()}) == 3


@pytest.mark.parametrize("size", [None, 2])
def test_one_mini_batch_is_the_batch(size: int | None) -> None:
    whole = batch()
    role = actor(Group(), size)
    assert [part is whole for part in role.mini_batches(whole)] == [True] and role.mini_batch_prompts == size


def test_mini_batches_keep_pairs_together() -> None:
    rows = DataProto.from_single_dict({"row": torch.arange(4), "uid": list("abcd"), "loss_group": [0, 1, 1, 0]})
    parts = [sorted(part["row"].tolist()) for part in actor(Group(), 2).mini_batches(rows)]
    assert sorted(parts) == [[0, 3], [1, 2]]


def test_an_update_is_told_the_counts_of_the_whole_mini_batch() -> None:
    group = Group(update_actor=lambda *_: mean(1.0))
    terms = LossTerm("clip"), LossTerm("kl", weight=0.0), LossTerm("entropy", weight=0.1)
    role = actor(group, step=3)
    assert role.update(batch(), *terms) == mean(1.0)
    [(method, _, active, counts, factor)] = group.calls
    assert method == "update_actor" and [term.name for term in active] == ["clip", "entropy"]
    assert counts == Counts(tokens=6, sequences=3, groups=2)
    assert factor == 0.25  # linear, step 3 of 4


def test_updates_are_counted_and_make_generation_fetch_the_weights() -> None:
    sides: list[str] = []
    shared = Phases(lambda _: None, lambda side: sides.append(side) or {})
    group = Group(update_actor=lambda *_: mean(1.0), generate_sequences=lambda request: request)
    role = actor(group)
    role._phases = shared
    rollout = RolloutRole(group, shared, role._progress, pad_token_id=0)
    rollout.generate(batch())
    for _ in range(2):
        role.update(batch(), LossTerm("clip"))
    rollout.generate(batch())
    assert role._progress.updates == 2 and sides == ["generation", "training", "generation"]


def test_a_critic_learns_by_its_own_schedule_and_is_no_version_of_the_policy() -> None:
    sides: list[str] = []
    shared = Phases(lambda _: None, lambda side: sides.append(side) or {})
    group = Group(
        update_critic=lambda *_: {**mean(1.0), "value_clip_fraction": Mean(0, 1)}, generate_sequences=lambda b: b,
        compute_values=lambda batch: DataProto.from_dict({"values": torch.ones(len(batch), 3)}),
    )  # fmt: skip
    run = SimpleNamespace(
        actor=SimpleNamespace(mini_batch_prompts=2),
        critic=SimpleNamespace(schedule=ScheduleConfig(warmup_steps=4)), trainer=SimpleNamespace(seed=3, steps=8),
    )  # fmt: skip
    role = CriticRole(group, shared, Progress(step=1), run)
    assert role.values(batch())["values"].tolist() == [[1.0] * 3] * 4
    RolloutRole(group, shared, role._progress, pad_token_id=0).generate(batch())
    learned = role.update(batch(), LossTerm("value_clip"), LossTerm("entropy", weight=0.0))
    assert learned == {"critic_loss": Mean(1.0, 1), "value_clip_fraction": Mean(0, 1)}
    method, _, active, counts, factor = group.calls[-1]
    assert method == "update_critic" and [term.name for term in active] == ["value_clip"]
    assert counts == Counts(tokens=6, sequences=3, groups=2) and factor == 0.25
    assert role._progress.updates == 0 and sides == ["generation", "training"]
    assert {name for name in shared.take() if name.startswith("time/")} >= {"time/values_s", "time/update_critic_s"}
    [whole] = [part["uid"].tolist() for part in role.mini_batches(batch())]
    assert whole == list("abab")


def test_generation_is_told_what_seeds_need_and_leaves_the_prompts_alone() -> None:
    group = Group(generate_sequences=lambda request: request)
    prompts = batch()
    prompts.meta_info["mine"] = 1
    role = RolloutRole(group, phases(), Progress(step=5), pad_token_id=9)
    assert role.generate(prompts, samples=3).meta_info == {
        "mine": 1, "samples": 3, "step": 5, "pad_token_id": 9, "recompute_log_probs": False,
    }  # fmt: skip
    assert role.generate(prompts, temperature=0.0).meta_info["temperature"] == 0.0
    assert prompts.meta_info == {"mine": 1}


@pytest.mark.parametrize("answer, shares", [(True, True), (False, False), ([True, True], True), ([True, False], False)])
def test_weights_are_shared_where_they_are_on_every_rank(answer: bool | list[bool], shares: bool) -> None:
    group = Group(shares_weights=lambda: answer)
    role = RolloutRole(group, phases(), Progress(step=1), pad_token_id=0)
    assert [role.shares_weights, role.shares_weights] == [shares, shares] and len(group.calls) == 1


def test_log_probs_join_the_batch() -> None:
    def column(name: str):
        return lambda batch: DataProto.from_dict({name: torch.ones(len(batch), 3)})

    group = Group(compute_log_prob=column("old_log_probs"), compute_ref_log_prob=column("ref_log_probs"))
    joined = ReferenceRole(group, phases()).log_probs(actor(group).log_probs(batch()))
    assert joined.keys() == ["response_mask", "old_log_probs", "ref_log_probs", "uid"]
