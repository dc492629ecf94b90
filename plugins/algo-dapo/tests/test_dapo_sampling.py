"""Which prompts a step learns from, and what is kept for the next one."""

from __future__ import annotations

import math
from pathlib import Path

import dapo_rig as rig
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drivetrain import DataProto, UserError
from drivetrain_algo_dapo.algorithm import DAPO
from drivetrain_algo_dapo.config import DAPOConfig

STEPS = 4


def mixed(batch: DataProto) -> list[str]:
    """The prompts whose samples are neither all right nor all wrong."""
    right: dict[str, list[float]] = {}
    for uid, correct in zip(batch["uid"].tolist(), batch["correct"].tolist()):
        right.setdefault(uid, []).append(correct)
    return [uid for uid, of_group in right.items() if 0 < sum(of_group) < len(of_group)]


@pytest.mark.parametrize("options, size", [([], 4), (["algorithm.round_prompts=9"], 9)])
def test_prompts_are_drawn_until_a_batch_of_telling_ones_is_full(run_file: Path, options: list[str], size: int) -> None:
    kept: list[str] = []
    ages: dict[str, int] = {}
    had_surplus, drawn = False, 0
    with rig.opened(run_file, *options) as made:
        sample, rounds = made.algorithm.sample, list[DataProto]()
        made.algorithm.sample = lambda *args: rounds.append(sample(*args)) or rounds[-1]
        for _ in range(STEPS):
            rounds.clear()
            batch = made.collect()
            had_surplus |= bool(kept)
            assert [len(rig.uids(part)) for part in rounds] == [4, *[size] * (len(rounds) - 1)]
            ages = {uid: age + 1 for uid, age in ages.items()}
            for number, part in enumerate(rounds):
                assert number == 0 or len(kept) < 4  # not drawn in vain
                kept += mixed(part)
                ages |= dict.fromkeys(mixed(part), 0)
            assert rig.uids(batch) == kept[:4] and len(batch) == 12
            assert batch["surplus_age"].tolist() == [ages[uid] for uid in batch["uid"].tolist()]
            kept = kept[4:]
            assert (rig.uids(made.algorithm.surplus) if made.algorithm.surplus else []) == kept and len(kept) < size
            drawn += 4 + size * (len(rounds) - 1)
            epoch, position = made.session.train_prompts.state_dict().values()
            assert epoch * 24 + position == drawn
            made.learn(batch)
            assert made.metrics["rounds"] == len(rounds) and made.metrics["surplus_groups"] == len(kept)
            made.session.progress.step += 1
    assert had_surplus


def test_the_surplus_keeps_the_log_probs_of_the_policy_that_drew_it(run_file: Path) -> None:
    with rig.opened(run_file, "algorithm.round_prompts=24") as made:
        batch = made.collect()
        waiting = rig.uids(made.algorithm.surplus)
        surplus = made.algorithm.surplus.select_uids(waiting[:4])
        made.learn(batch)
        made.session.progress.step += 1
        used = made.collect()[: len(surplus)]
        unknown = [name for name in used.batch if name not in ("old_log_probs", "entropy")]
        now = made.roles.actor.log_probs(used.select(unknown))
    assert used["uid"].tolist() == surplus["uid"].tolist() and set(used["surplus_age"].tolist()) == {1}
    for name in ("old_log_probs", "rollout_log_probs", "responses", "scores"):
        assert used[name].equal(surplus[name])
    torch.testing.assert_close(used["old_log_probs"], used["rollout_log_probs"], rtol=0, atol=2e-5)
    assert ((now["old_log_probs"] - used["old_log_probs"]) * used["response_mask"]).abs().max() > 0.01


def test_the_surplus_keeps_its_importance_weights(run_file: Path) -> None:
    """Where engines differ; here they are told to, and agree but for rounding."""
    with rig.opened(run_file, "algorithm.round_prompts=24") as made:
        made.roles.rollout.shares_weights = False
        made.learn(made.collect())
        made.session.progress.step += 1
        batch = made.collect()
        made.learn(batch)
    assert int(batch["surplus_age"].max()) == 1
    torch.testing.assert_close(batch["rollout_is_weights"], batch["response_mask"].float(), rtol=0, atol=1e-4)
    assert made.metrics["rollout_truncated"] == 0 and made.metrics["rollout_is_weight"] == pytest.approx(1, abs=1e-4)


def test_advantages_are_those_of_whole_groups(run_file: Path) -> None:
    """Equation 9, of the rewards with the penalty of equation 13."""
    with rig.opened(run_file, "algorithm.overlong_cache_tokens=4", "algorithm.overlong_penalty=0.5") as made:
        batch = made.collect()
    rewards = []
    for mask, correct in zip(batch["response_mask"].tolist(), batch["correct"].tolist()):
        rewards.append(correct - 0.5 * max(0.0, (sum(mask) - 2) / 4))
    assert len(set(rewards)) > 4
    for row, uid in enumerate(batch["uid"]):
        group = [reward for reward, other in zip(rewards, batch["uid"]) if other == uid]
        mean = sum(group) / 3
        std = math.sqrt(sum((reward - mean) ** 2 for reward in group) / 2)
        want = (rewards[row] - mean) / (std + 1e-6)
        for mask, found in zip(batch["response_mask"][row].tolist(), batch["advantages"][row].tolist()):
            assert found == pytest.approx(want * mask, rel=1e-4, abs=1e-6)


def test_what_is_told_of_the_draws(run_file: Path) -> None:
    with rig.opened(run_file) as made:
        made.learn(made.collect())
        epoch, position = made.session.train_prompts.state_dict().values()
    drawn = epoch * 24 + position
    assert made.metrics["rounds"] * 4 == drawn
    assert made.metrics["filtered_groups"] == pytest.approx(1 - (4 + made.metrics["surplus_groups"]) / drawn)
    assert 0 < made.metrics["drawn_reward"] < 1 and made.metrics["surplus_age"] == 0


def test_too_few_prompts_stop_the_run(run_file: Path) -> None:
    with rig.opened(run_file, rig.reward(run_file, "always"), "algorithm.max_rounds=3") as made:
        with pytest.raises(UserError) as raised:
            made.collect()
        assert made.session.train_prompts.state_dict() == {"epoch": 0, "position": 12}
    said = str(raised.value)
    assert "only 0 of 12 prompts drawn in 3 rounds (0%) have responses both right and wrong" in said
    assert "the step needs 4" in said and "algorithm.max_rounds" in said and "set too_few to fewer" in said


@pytest.mark.parametrize("multiple", ["2", "null"])
def test_fewer_prompts_fill_whole_mini_batches(run_file: Path, multiple: str) -> None:
    options = ["data.batch_prompts=8", f"actor.mini_batch_prompts={multiple}", "algorithm.max_rounds=1",
               "algorithm.too_few=fewer"]  # fmt: skip
    sizes, waited = [], 0
    with rig.opened(run_file, *options) as made:
        for _ in range(STEPS):
            before = rig.uids(made.algorithm.surplus) if made.algorithm.surplus else []
            try:
                batch = made.collect()
            except UserError as error:
                assert f"the step needs {2 if multiple == '2' else 1}" in str(error)
            else:
                sizes.append(len(rig.uids(batch)))
                assert rig.uids(batch)[: len(before)] == before
                waited += len(before)
                made.learn(batch)
                assert made.metrics["rounds"] == 1 and made.metrics["surplus_groups"] < 2
            made.session.progress.step += 1
    assert min(sizes) < 8
    if multiple == "2":
        assert all(size % 2 == 0 for size in sizes) and waited > 0
    else:
        assert waited == 0


def test_a_reward_that_does_not_tell_right_from_wrong_needs_the_other_filter(run_file: Path) -> None:
    with (
        rig.opened(run_file, rig.reward(run_file, "length")) as made,
        pytest.raises(UserError, match="filter_by to score"),
    ):
        made.collect()
    with rig.opened(run_file, rig.reward(run_file, "length"), "algorithm.filter_by=score") as made:
        batch = made.collect()
    assert len(rig.uids(batch)) == 4
    for uid in rig.uids(batch):
        assert len(set(batch.select_uids([uid])["scores"].tolist())) > 1


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.sampled_from("abcd"), st.booleans(), st.booleans()), max_size=16))
def test_a_group_is_judged_by_the_rows_that_were_answered(rows: list[tuple[str, bool, bool]]) -> None:
    batch = DataProto.from_dict(
        {"correct": torch.tensor([float(correct) for _, correct, _ in rows]),
         "response_mask": torch.tensor([[int(answered)] * 2 for *_, answered in rows]).reshape(len(rows), 2)},
        {"uid": [uid for uid, *_ in rows]},
    )  # fmt: skip
    found = DAPO(DAPOConfig(name="dapo")).telling(batch)
    judged = {uid: {correct for other, correct, answered in rows if other == uid and answered} for uid, *_ in rows}
    want = [uid for uid, *_ in rows if judged[uid] == {True, False}]
    assert found["uid"].tolist() == want
