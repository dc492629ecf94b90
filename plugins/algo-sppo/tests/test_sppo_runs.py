"""SPPO equals its algorithm, written out in plain PyTorch on a tiny Llama."""

from __future__ import annotations

from pathlib import Path

import pytest
import sppo_rig as rig
import torch

from drivetrain import ConfigError, DataProto, UserError


def rows_by_prompt(batch: DataProto) -> list[list[int]]:
    uids = batch["uid"].tolist()
    return [[row for row, its in enumerate(uids) if its == uid] for uid in dict.fromkeys(uids)]


def plain_rates(batch: DataProto, preference: str, temperature: float = 1.0) -> list[float]:
    scores, rates = batch["scores"].tolist(), [0.0] * len(batch)
    for rows in rows_by_prompt(batch):
        for row in rows:
            rates[row] = rig.plain_win_rate(scores[row], [scores[k] for k in rows], preference, temperature)
    return rates


def plain_pairs(batch: DataProto) -> list[tuple[int, int]]:
    """The first of the best and the last of the worst samples of each prompt."""
    scores, pairs = batch["scores"].tolist(), []
    for rows in rows_by_prompt(batch):
        best = max(rows, key=lambda row: (scores[row], -row))
        pairs.append((best, min(rows, key=lambda row: (scores[row], -row))))
    return pairs


@pytest.mark.parametrize(
    "options, preference, temperature",
    [
        ([], "bradley_terry", 1.0),
        (["algorithm.preference_temperature=0.25", "algorithm.epochs=2"], "bradley_terry", 0.25),
        (["algorithm.preference=order", "actor.backend.micro_batch_tokens=1"], "order", 1.0),
    ],
)
def test_an_iteration(run_file: Path, options: list[str], preference: str, temperature: float) -> None:
    with rig.opened(run_file, *options) as made:
        batch, start = made.collect(), made.weights()
        learned, updates = made.learn(batch), rig.prompts_of_updates(made, batch)
        assert made.session.progress.updates == len(updates) == 2 * made.run.algorithm.epochs
    opponent = rig.plain_model(made.run.model.path)
    for row in range(len(batch)):
        with torch.no_grad():
            want = rig.plain_log_probs(opponent, batch, row)
        torch.testing.assert_close(batch["old_log_probs"][row, : len(want)], want, rtol=0, atol=2e-5)
    rates = plain_rates(batch, preference, temperature)
    torch.testing.assert_close(batch["win_rate"], torch.tensor(rates), rtol=0, atol=1e-6)
    assert batch["win_rate"].max() > 0.6
    targets = {row: rates[row] for pair in plain_pairs(batch) for row in pair}
    assert len(targets) == 8
    want = rig.learn_plainly(made.run, batch, updates, targets)
    for name, tensor in want.items():
        torch.testing.assert_close(learned[name], tensor.detach(), rtol=0, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")
    assert max(float((learned[name] - start[name]).abs().max()) for name in start) > 5e-3
    assert made.metrics["entropy"] > 0 and "log_ratio_win" in made.metrics


def test_all_samples_can_be_learnt(run_file: Path) -> None:
    with rig.opened(run_file, "algorithm.train=all") as made:
        batch = made.collect()
        learned, updates = made.learn(batch), rig.prompts_of_updates(made, batch)
    want = rig.learn_plainly(made.run, batch, updates, dict(enumerate(plain_rates(batch, "bradley_terry"))))
    for name, tensor in want.items():
        torch.testing.assert_close(learned[name], tensor.detach(), rtol=0, atol=2e-5)


def test_hard_labels(run_file: Path) -> None:
    """The best wins for sure and the worst loses, but for a prompt whose samples are equal."""
    with rig.opened(run_file, "algorithm.labels=hard") as made:
        batch = made.collect()
        scores = batch["scores"].clone()
        equal, *_ = rows_by_prompt(batch)
        scores[equal] = 2.0
        rates = batch["win_rate"].clone()
        rates[equal] = 0.5
        batch = batch.with_columns(scores=scores, win_rate=rates)
        learned, updates = made.learn(batch), rig.prompts_of_updates(made, batch)
    targets = {}
    for best, worst in plain_pairs(batch):
        differ = float(scores[best]) > float(scores[worst])
        targets[best], targets[worst] = (1.0, 0.0) if differ else (0.5, 0.5)
    assert [targets[row] for row in targets if row in equal] == [0.5, 0.5] and {0.0, 1.0} < set(targets.values())
    want = rig.learn_plainly(made.run, batch, updates, targets)
    for name, tensor in want.items():
        torch.testing.assert_close(learned[name], tensor.detach(), rtol=0, atol=2e-5)


def test_samples_that_are_all_equal_leave_the_policy_where_it_is(run_file: Path) -> None:
    with rig.opened(run_file, rig.judged_by(run_file, "constant")) as made:
        batch, start = made.collect(), made.weights()
        assert (batch["win_rate"] == 0.5).all()
        learned = made.learn(batch)
    assert max(float((learned[name] - start[name]).abs().max()) for name in start) < 1e-4


def test_a_reward_can_be_the_win_rate(run_file: Path) -> None:
    with rig.opened(run_file, "algorithm.preference=win_rate", rig.judged_by(run_file, "share")) as made:
        batch = made.collect()
    assert batch["win_rate"].equal(batch["scores"]) and batch["scores"].unique().numel() > 2


def test_a_score_that_is_no_win_rate_is_refused_and_its_reward_named(run_file: Path) -> None:
    with rig.opened(run_file, "algorithm.preference=win_rate") as made:
        with pytest.raises(UserError, match=r"reward 'function' gave \d, which is no win probability") as raised:
            made.collect()
    assert "algorithm.preference" in str(raised.value) and "bradley_terry" in str(raised.value)


@pytest.mark.parametrize(
    "overrides, said",
    [
        (["algorithm.group_size=1"], "algorithm.group_size"),
        (["algorithm.eta=0"], "algorithm.eta"),
        (["algorithm.preference=elo"], "algorithm.preference"),
        (["algorithm.preference=order", "algorithm.preference_temperature=2"], "preference order does not read it"),
        (["algorithm.train=all", "algorithm.labels=hard"], "but all are learnt"),
        (["rollout.temperature=0"], "draws every sample of a prompt alike"),
        (["rewards=[]"], "rewards"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(run_file: Path, overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        rig.config(run_file, *overrides)
    assert said in str(raised.value)
