"""SPIN with real engines equals plain PyTorch, one row at a time, over iterations."""

from __future__ import annotations

import json
from pathlib import Path

import dpo_rig as rig
import pytest
import torch

from drivetrain import ConfigError, DataProto
from drivetrain.cli.train import train
from drivetrain_algo_dpo.pairs import join_pairs

TEXTS = {"1=": "12", "23=": "45670123", "456=": "8", "7890=": "123"}


def tokens(batch: DataProto, row: int) -> list[int]:
    return batch["responses"][row][batch["response_mask"][row] == 1].tolist()


def plain_opponent(model: torch.nn.Module, pairs: DataProto, temperature: float) -> torch.Tensor:
    """Log-probs by a model, zero beyond the mask."""
    found = torch.zeros(pairs["response_mask"].shape)
    with torch.no_grad():
        for row, values in enumerate(rig.plain_log_probs(model, pairs, temperature)):
            found[row, pairs["response_mask"][row] == 1] = values
    return found


def test_pairs_are_the_data_and_what_the_opponent_drew(run_file: Path) -> None:
    with rig.opened(run_file, "rollout.temperature=0.7") as made:
        prompts = made.session.train_prompts.next_batch(4)
        pairs = made.algorithm.collect(made.roles, prompts)
        drawn = made.roles.rollout.generate(prompts)
    assert pairs["preference"].tolist() == [1, -1] * 4
    assert pairs["responses"].shape[1] == 9 and drawn["responses"].shape[1] == 6
    for pair, prompt in enumerate(drawn["raw_prompt"]):
        assert tokens(pairs, 2 * pair) == [*(int(digit) + 2 for digit in TEXTS[prompt]), 1]
        assert tokens(pairs, 2 * pair + 1) == tokens(drawn, pair)
    want = plain_opponent(rig.plain_model(run_file.parent / "policy"), pairs, 0.7)
    torch.testing.assert_close(pairs["ref_log_probs"] * pairs["response_mask"], want, rtol=0, atol=2e-5)


def test_two_iterations(run_file: Path) -> None:
    """The second opponent is the policy after the first iteration's updates, of which there are four."""
    with rig.opened(run_file, "algorithm.epochs=2", "rollout.temperature=0.8") as made:
        first = made.collect()
        updates, start = made.rows_of_updates(first), made.weights()
        learned = made.learn(first)
        made.session.progress.step = 2
        second = made.collect()
    assert len(updates) == 4
    plain = rig.plain_model(run_file.parent / "policy")
    plain.load_state_dict(rig.learn_plainly(made.run, first, updates), strict=False)
    assert rig.distance(learned, start) > 1e-2
    rig.assert_same(learned, dict(plain.named_parameters()))
    want = plain_opponent(plain, second, 0.8)
    torch.testing.assert_close(second["ref_log_probs"] * second["response_mask"], want, rtol=0, atol=1e-3)
    assert (want - plain_opponent(rig.plain_model(run_file.parent / "policy"), second, 0.8)).abs().max() > 0.1


def test_micro_batches_change_nothing(run_file: Path) -> None:
    learned = []
    for limit in (1, 1000):
        with rig.opened(run_file, f"actor.backend.micro_batch_tokens={limit}") as made:
            learned.append(made.learn(made.collect()))
    rig.assert_same(learned[0], learned[1], 1e-5)


def test_the_first_update_of_an_iteration_starts_at_log_two(run_file: Path) -> None:
    with rig.opened(run_file, "actor.mini_batch_prompts=4") as made:
        made.learn(made.collect())
    assert made.metrics["loss"] == pytest.approx(0.6931, abs=1e-4)
    assert made.metrics["margin"] == pytest.approx(0, abs=1e-4)


def test_a_response_that_the_opponent_drew_itself_teaches_nothing(run_file: Path) -> None:
    with rig.opened(run_file, "actor.mini_batch_prompts=4") as made:
        own = made.roles.text.respond(made.session.train_prompts.next_batch(4))
        pairs = made.roles.actor.log_probs(join_pairs(own, own)).rename({"old_log_probs": "ref_log_probs"})
        start, learned = made.weights(), made.learn(pairs)
        assert made.metrics["same_response"] == 1 and made.metrics["grad_norm"] < 1e-5
        rig.assert_same(learned, start, 1e-4)
        made.learn(made.collect())
        assert made.metrics["same_response"] == 0


@pytest.mark.parametrize("overrides, said", [
    (["data.train.response_key=null"], "response_key is not set"),
    (["rollout.temperature=0"], "greedy ones are not"),
    (["rollout=null"], "rollout is missing"),
    (["algorithm.beta=0"], "algorithm.beta"),
    (["ref.backend.name=fsdp"], "has no role ref"),
])  # fmt: skip
def test_settings_that_cannot_be_meant_are_refused(run_file: Path, overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        rig.config(run_file, *overrides)
    assert said in str(raised.value)


def test_a_run_and_its_resumption(run_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    options = [f"trainer.run_dir={folder}", "trackers=[{name: jsonl}]"]
    assert train(run_file, [*options, "trainer.steps=2"], resume=None, overwrite=False) == 0
    assert train(run_file, [*options, "trainer.steps=3"], resume=str(folder), overwrite=False) == 0
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][1:]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all({"train/loss", "train/same_response", "train/preference_accuracy"} <= row.keys() for row in rows)
