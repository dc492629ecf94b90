"""``dpo`` and ``online_dpo`` with real engines equal plain PyTorch, one row at a time."""

from __future__ import annotations

from pathlib import Path

import dpo_rig as rig
import pytest
import torch

from drivetrain import DataProto
from drivetrain_algo_dpo.pairs import scored_pairs

ONLINE = ["algorithm.name=online_dpo", "algorithm.group_size=3"]
POLICY = [*ONLINE, "algorithm.reference=policy", "ref=null"]


@pytest.fixture(scope="module")
def collected(run_file: Path) -> DataProto:
    with rig.opened(run_file) as made:
        return made.collect()


def reference(path: Path, name: str, batch: DataProto, temperature: float = 1.0) -> torch.Tensor:
    """Log-probs by a model, zero beyond the mask."""
    with torch.no_grad():
        rows = rig.plain_log_probs(rig.plain_model(path.parent / name), batch, temperature)
    found = torch.zeros(batch["response_mask"].shape)
    for row, values in enumerate(rows):
        found[row, batch["response_mask"][row] == 1] = values
    return found


def test_what_dpo_collects(run_file: Path, collected: DataProto) -> None:
    texts = {prompt: (chosen, rejected) for prompt, chosen, rejected in rig.PAIRS}
    rows = zip(collected["raw_prompt"], collected["preference"], collected["responses"], collected["response_mask"])
    for prompt, side, tokens, mask in rows:
        want = texts[prompt][0 if side == 1 else 1]
        assert tokens[mask == 1].tolist() == [*(int(digit) + 2 for digit in want), 1]
    assert collected["loss_group"].tolist() == collected["uid"].tolist()
    want = reference(run_file, "other", collected)
    torch.testing.assert_close(collected["ref_log_probs"] * collected["response_mask"], want, rtol=0, atol=2e-5)


@pytest.mark.parametrize("options", [
    ["algorithm.label_smoothing=0.1", "algorithm.epochs=2"], ["algorithm.kind=ipo", "actor.max_grad_norm=1e3"],
    ["algorithm.kind=hinge", "algorithm.beta=0.05"],
])  # fmt: skip
def test_updates_of_dpo(run_file: Path, collected: DataProto, options: list[str]) -> None:
    with rig.opened(run_file, *options, "rollout.temperature=0.7") as made:  # which is evaluation's alone
        updates, start = made.rows_of_updates(collected), made.weights()
        learned = made.learn(collected)
    assert len(updates) == 2 * made.run.algorithm.epochs
    assert rig.distance(learned, start) > 5e-3
    rig.assert_same(learned, rig.learn_plainly(made.run, collected, updates))


def test_micro_batches_change_nothing(run_file: Path, collected: DataProto) -> None:
    """Even where there is room for a token alone, a pair is computed together."""
    learned = []
    for tokens in (1, 12, 1000):
        with rig.opened(run_file, f"actor.backend.micro_batch_tokens={tokens}") as made:
            learned.append(made.learn(collected))
    rig.assert_same(learned[0], learned[2], 5e-6)
    rig.assert_same(learned[1], learned[2], 5e-6)


@pytest.mark.parametrize("options", [ONLINE, POLICY])
def test_updates_of_online_dpo(run_file: Path, options: list[str]) -> None:
    with rig.opened(run_file, *options, "rollout.temperature=0.7") as made:
        batch = made.collect()
        pairs = scored_pairs(batch, 3)
        updates, learned = made.rows_of_updates(pairs), made.learn(batch)
    assert len(batch) == 12 and len(pairs) == 8 and int(pairs["response_mask"].any(1).sum()) > 2
    model = "other" if options is ONLINE else "policy"
    want = reference(run_file, model, pairs, 0.7)
    torch.testing.assert_close(pairs["ref_log_probs"] * pairs["response_mask"], want, rtol=0, atol=2e-5)
    alive = pairs["scores"][0::2] > pairs["scores"][1::2]
    rig.assert_same(learned, rig.learn_plainly(made.run, pairs, updates, lambda row: bool(alive[row // 2])))


def test_prompts_whose_samples_score_alike_teach_nothing(run_file: Path) -> None:
    judge = f"rewards=[{{name: function, path: '{run_file.parent / 'judge.py'}:fussy'}}]"
    with rig.opened(run_file, *ONLINE, judge, "actor.mini_batch_prompts=1") as made:
        batch, start = made.collect(), made.weights()
        alike = batch[[prompt not in ("1=", "456=") for prompt in batch["raw_prompt"]]]
        assert rig.distance(made.learn(alike), start) == 0
        assert made.metrics["loss"] == made.metrics["preference_accuracy"] == 0
        updates = made.rows_of_updates(scored_pairs(batch, 3))
    assert len(alike) == 6 and len(updates) == 4
    with rig.opened(run_file, *ONLINE, judge, "actor.mini_batch_prompts=null") as made:
        learned = made.learn(batch)
    pairs = scored_pairs(batch, 3)
    kept = [row for row in range(8) if pairs["response_mask"][row].any()]
    assert 0 < len(kept) <= 4
    rig.assert_same(learned, rig.learn_plainly(made.run, pairs, [kept]))
