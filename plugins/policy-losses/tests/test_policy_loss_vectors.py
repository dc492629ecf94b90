"""The losses equal core's reference vectors to 1e-8: value, gradient, and the metrics that mean the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain import resolve
from drivetrain.metrics import to_floats
from drivetrain.numerics import Counts, LossInputs

VECTORS = json.loads((Path(__file__).parents[3] / "core/tests/data/rl_numerics.json").read_text())["cases"]
CLIP = {"clip_ratio_low": "clip_low", "clip_ratio_high": "clip_high"}
REDUCE = {"aggregation": "aggregation"}
# Per case: our name, and the vector's inputs that are options here. gspo and geo_mean are means over sequences there
# as well, whatever `aggregation` says.
LOSSES: dict[str, tuple[str, dict[str, str]]] = {
    "policy_loss/gspo": ("gspo", CLIP),
    "policy_loss/sapo": ("sapo", {"tau_pos": "tau_pos", "tau_neg": "tau_neg", **REDUCE}),
    "policy_loss/gpg": ("gpg", REDUCE),
    "policy_loss/cispo": ("cispo", {**CLIP, **REDUCE}),
    "policy_loss/geo_mean": ("gmpo", CLIP),
}
CASES = [pytest.param(c, id=f"{c['name']}-{number}") for number, c in enumerate(VECTORS) if c["name"] in LOSSES]


def tensor(nested: Any) -> torch.Tensor:
    return torch.tensor(nested, dtype=torch.float64)


def close(actual: torch.Tensor | float, expected: Any) -> None:
    torch.testing.assert_close(torch.as_tensor(actual, dtype=torch.float64), tensor(expected), rtol=0, atol=1e-8)


@pytest.mark.parametrize("case", CASES)
def test_vector(case: dict[str, Any]) -> None:
    given, expected = case["inputs"], case["outputs"]
    name, options = LOSSES[case["name"]]
    log_probs = tensor(given["log_prob"]).requires_grad_()
    batch = {
        "response_mask": tensor(given["response_mask"]),
        "old_log_probs": tensor(given["old_log_prob"]),
        "advantages": tensor(given["advantages"]),
    }
    chosen = {ours: given[theirs] for theirs, ours in options.items()}
    counts = Counts.of(batch["response_mask"])
    result = resolve("policy_losses", name)(LossInputs(log_probs=log_probs), batch, counts, **chosen)
    result.loss.backward()
    assert log_probs.grad is not None
    close(result.loss.detach(), expected["loss"])
    close(log_probs.grad, expected["grad_log_prob"])
    metrics = to_floats(result.metrics)
    if "approx_kl" in metrics:
        close(metrics["approx_kl"], expected["metrics"]["actor/ppo_kl"])
    # geo_mean counts tokens outside the range on either side, gmpo those that the paper's one-sided cut changes
    if "clip_fraction" in metrics and name != "gmpo":
        close(metrics["clip_fraction"], expected["metrics"]["actor/pg_clipfrac"])


def test_every_vector_of_a_policy_loss_is_covered() -> None:
    assert len(CASES) == 12
    names = {case["name"] for case in VECTORS if case["name"].startswith("policy_loss/")}
    assert names - set(LOSSES) == {"policy_loss/vanilla"}  # which is core's `clip`
