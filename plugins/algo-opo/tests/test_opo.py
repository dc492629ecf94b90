"""OPO: its baseline against the vectors and the paper's formula, its update against plain PyTorch, its refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drivetrain import DataProto
from drivetrain.errors import ConfigError
from drivetrain.numerics import group_index
from drivetrain.testing import AdvantageConformance, tiny
from drivetrain_algo_opo.advantage import opo_advantage

VECTORS = Path(__file__).parents[3] / "core/tests/data/rl_numerics.json"
CASES = [case for case in json.loads(VECTORS.read_text())["cases"] if case["name"] == "advantage/opo"]


class TestConformance(AdvantageConformance):
    name = "opo"
    equal_rewards_give_zero = True


@pytest.mark.parametrize("case", CASES, ids=["right padded", "inner zeros"])
def test_vector(case: dict) -> None:
    given = {k: torch.tensor(case["inputs"][k], dtype=torch.float64) for k in ("token_level_rewards", "response_mask")}
    found = opo_advantage(given, group_index(case["inputs"]["group"]))
    want = torch.tensor(case["outputs"]["advantages"], dtype=torch.float64)
    torch.testing.assert_close(found, want, rtol=0, atol=1e-8)


def plain(rewards: Tensor, mask: Tensor, group: list[int]) -> Tensor:
    """``r(x, y_i) - sum_j l_j r(x, y_j) / sum_j l_j`` over the answers to a prompt, on each token of y_i."""
    out = torch.zeros_like(rewards)
    for i, own in enumerate(group):
        others = [j for j, its in enumerate(group) if its == own]
        reward = [sum(r for r, m in zip(rewards[j].tolist(), mask[j].tolist()) if m) for j in range(len(group))]
        length = [sum(mask[j].tolist()) for j in range(len(group))]
        whole = sum(length[j] for j in others)
        baseline = sum(length[j] * reward[j] for j in others) / whole if whole else 0.0
        for t, selected in enumerate(mask[i].tolist()):
            out[i, t] = reward[i] - baseline if selected else 0.0
    return out


def test_formula_of_the_paper() -> None:
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randn(9, 5, generator=generator, dtype=torch.float64)
    mask = (torch.rand(9, 5, generator=generator) < 0.6).long()
    mask[3] = 0  # an answer without a token has no part in its group's baseline
    group = [0, 1, 0, 2, 2, 1, 0, 1, 3]  # prompt 3 has one answer
    found = opo_advantage({"token_level_rewards": rewards, "response_mask": mask}, torch.tensor(group))
    torch.testing.assert_close(found, plain(rewards, mask, group), rtol=0, atol=1e-12)


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    return tiny.write_run(tmp_path, {"name": "opo", "group_size": 3}, backend="fsdp", optimizer="adamw", rollout="hf")


def test_an_update_is_the_policy_gradient_of_its_advantages(run_file: Path) -> None:
    with tiny.opened(run_file) as made:
        batch = made.collect()
        assert "old_log_probs" not in batch and float(batch["advantages"].abs().max()) > 0.1
        learned, updates = made.learn(batch), made.rows_of_updates(batch)
    assert updates == [list(range(12))]

    def loss(log_probs: Tensor, entropy: Tensor, batch: DataProto, c: Any) -> Tensor:
        rows = zip(batch["advantages"], log_probs, batch["response_mask"])
        return torch.stack([(-a * p)[m == 1].sum() for a, p, m in rows]).mean()

    tiny.assert_same(learned, tiny.learn_plainly(made.run, batch, updates, loss))
    drawn = torch.cat([-p[m == 1] for p, m in zip(batch["rollout_log_probs"], batch["response_mask"])])
    assert made.metrics["entropy"] == pytest.approx(float(drawn.mean()), rel=1e-5)


@pytest.mark.parametrize(
    "overrides, said",
    [
        (["actor.mini_batch_prompts=2"], "a batch is good for one update"),
        (["algorithm.epochs=2"], "unknown key 'epochs'"),
        (["algorithm.kl_coef=0.1"], "unknown key 'kl_coef'"),
        (["algorithm.entropy_coef=0.1"], "unknown key 'entropy_coef'"),
        (["algorithm.group_size=1"], "algorithm.group_size"),
        (["algorithm.scale=6"], "set both, or neither"),
        (["rollout.temperature=0"], "samples of the policy itself"),
        (["rollout.top_k=3"], "samples of the policy itself"),
    ],
)
def test_what_would_not_be_on_policy_is_refused(run_file: Path, overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        tiny.config(run_file, *overrides)
    assert said in str(raised.value)
