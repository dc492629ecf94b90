"""Reference vectors, float64, to 1e-8 absolute.

The vectors are printed to 9 significant digits, inputs as well as outputs. In eight numbers of kl/k2, kl/k3 and
aggregate/token-sum the rounding of the inputs alone moves the result by more than 1e-8: these kinds are held to 1e-8 or
to the rounding carried through the formula, whichever is larger for that number.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drivetrain.metrics import to_floats
from drivetrain.numerics import (
    Counts,
    LossInputs,
    aggregate,
    clip,
    gae,
    group_advantage,
    group_index,
    kl_penalty,
    truncated_weights,
    value_clip,
)

CASES = json.loads((Path(__file__).parents[1] / "data" / "rl_numerics.json").read_text())["cases"]

# The vectors of what plugins bring, by plugin: its own tests hold it to them.
OWNERS = {
    "advantages": (
        "advantage/rloo", "advantage/reinforce_plus_plus", "advantage/reinforce_plus_plus_baseline", "advantage/remax",
        "advantage/gpg",
    ),
    "algo-opo": ("advantage/opo",),
    "policy-losses": (
        "policy_loss/gspo", "policy_loss/sapo", "policy_loss/gpg", "policy_loss/cispo", "policy_loss/geo_mean",
    ),
}  # fmt: skip
OF_PLUGINS = {name for names in OWNERS.values() for name in names}


def tensor(nested: Any) -> Tensor:
    return torch.tensor(nested, dtype=torch.float64)


def half_unit(printed: Tensor) -> Tensor:
    """Half a unit in the 9th significant digit."""
    return torch.where(printed == 0, 0.0, 5 * 10 ** (printed.abs().log10().floor() - 9))


def close(actual: Tensor | float, expected: Any, rounding: Tensor | float = 0.0) -> None:
    difference = (torch.as_tensor(actual, dtype=torch.float64) - tensor(expected)).abs()
    allowed = torch.as_tensor(rounding, dtype=torch.float64).clamp(min=1e-8)
    assert (difference <= allowed).all(), f"off by {difference.max().item():.3g}"


def check_gae(name: str, given: dict[str, Any], expected: dict[str, Any]) -> None:
    mask = tensor(given["response_mask"])
    rewards, values = tensor(given["token_level_rewards"]), tensor(given["values"])
    advantages, returns = gae(rewards, values, mask, given["gamma"], given["lam"], whiten=True)
    close(advantages, expected["advantages"])
    close(returns, expected["returns"])


def check_group_advantage(name: str, given: dict[str, Any], expected: dict[str, Any]) -> None:
    batch = {key: tensor(given[key]) for key in ("token_level_rewards", "response_mask")}
    advantages = group_advantage(
        batch, group_index(given["group"]), normalize_by_std=given["normalize_by_std"], epsilon=given["epsilon"]
    )
    close(advantages, expected["advantages"])


def check_kl(name: str, given: dict[str, Any], expected: dict[str, Any]) -> None:
    kind = name.split("/")[1]
    log_probs, ref_log_probs = tensor(given["log_prob"]), tensor(given["ref_log_prob"])
    d = ref_log_probs - log_probs
    slope = {"k2": d.abs(), "k3": (d.exp() - 1).abs()}.get(kind, torch.zeros_like(d))
    rounding = slope * (half_unit(log_probs) + half_unit(ref_log_probs)) + half_unit(tensor(expected["kl"]))
    close(kl_penalty(log_probs, ref_log_probs, kind), expected["kl"], rounding)


def check_aggregate(name: str, given: dict[str, Any], expected: dict[str, Any]) -> None:
    mode, loss, mask = name.split("/")[1], tensor(given["loss"]), tensor(given["mask"])
    rounding = (half_unit(loss) * mask).sum() if mode == "token-sum" else 0.0
    close(aggregate(loss, mask, mode, scale=given.get("loss_scale_factor")), expected["value"], rounding)


def check_clip(name: str, given: dict[str, Any], expected: dict[str, Any]) -> None:
    log_probs = tensor(given["log_prob"]).requires_grad_()
    batch = {
        "response_mask": tensor(given["response_mask"]),
        "old_log_probs": tensor(given["old_log_prob"]),
        "advantages": tensor(given["advantages"]),
    }
    if given["rollout_is_weights"] is not None:
        batch["rollout_is_weights"] = tensor(given["rollout_is_weights"])
    result = clip(
        LossInputs(log_probs=log_probs),
        batch,
        Counts.of(batch["response_mask"]),
        clip_low=given["clip_ratio_low"],
        clip_high=given["clip_ratio_high"],
        clip_dual=given["clip_ratio_c"],
        aggregation=given["aggregation"],
    )
    result.loss.backward()
    close(result.loss, expected["loss"])
    assert log_probs.grad is not None
    close(log_probs.grad, expected["grad_log_prob"])
    metrics = to_floats(result.metrics)
    close(metrics["clip_fraction"], expected["metrics"]["actor/pg_clipfrac"])
    close(metrics["clip_fraction_dual"], expected["metrics"]["actor/pg_clipfrac_lower"])
    close(metrics["approx_kl"], expected["metrics"]["actor/ppo_kl"])


def check_value_clip(name: str, given: dict[str, Any], expected: dict[str, Any]) -> None:
    batch = {
        "response_mask": tensor(given["response_mask"]),
        "values": tensor(given["values_old"]),
        "returns": tensor(given["returns"]),
    }
    result = value_clip(
        LossInputs(values=tensor(given["values_new"])),
        batch,
        Counts.of(batch["response_mask"]),
        clip_range=given["clip_range"],
        aggregation=given["aggregation"],
    )
    close(result.loss, expected["loss"])
    close(result.metrics["value_clip_fraction"].result(), expected["clip_fraction"])


def check_truncated_weights(name: str, given: dict[str, Any], expected: dict[str, Any]) -> None:
    level = name.removeprefix("rollout_correction/tis_")
    weights = truncated_weights(
        tensor(given["log_ratio"]), tensor(given["response_mask"]), level, threshold=given["threshold"]
    )
    close(weights, expected["weights"])


CHECKS: dict[str, Callable[[str, dict[str, Any], dict[str, Any]], None]] = {
    "advantage/gae": check_gae,
    "advantage/grpo": check_group_advantage,
    "advantage/dr_grpo": check_group_advantage,
    "kl/k1": check_kl,
    "kl/k2": check_kl,
    "kl/k3": check_kl,
    "kl/abs": check_kl,
    "aggregate/token-mean": check_aggregate,
    "aggregate/token-sum": check_aggregate,
    "aggregate/seq-mean-token-sum": check_aggregate,
    "aggregate/seq-mean-token-mean": check_aggregate,
    "aggregate/seq-mean-token-sum-norm": check_aggregate,
    "policy_loss/vanilla": check_clip,
    "value_loss/clipped": check_value_clip,
    "rollout_correction/tis_token": check_truncated_weights,
    "rollout_correction/tis_sequence": check_truncated_weights,
}

OWN_CASES = [
    pytest.param(case, id=f"{number}-{case['name']}")
    for number, case in enumerate(CASES)
    if case["name"] not in OF_PLUGINS
]


@pytest.mark.parametrize("case", OWN_CASES)
def test_vector(case: dict[str, Any]) -> None:
    CHECKS[case["name"]](case["name"], case["inputs"], case["outputs"])


def test_every_vector_has_an_owner() -> None:
    assert {case["name"] for case in CASES} == set(CHECKS) | OF_PLUGINS
    assert not set(CHECKS) & OF_PLUGINS
    assert len(CASES) == 72
