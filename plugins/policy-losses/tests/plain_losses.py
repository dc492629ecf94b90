"""The losses written out token by token, as the papers have them; shares nothing with the product."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Token = dict[str, Any]  # log_prob (a tensor), old, advantage, weight
Rows = list[list[Token]]  # of each row its selected tokens
ZERO = torch.zeros((), dtype=torch.float64)


def rows_of(log_probs: Tensor, batch: dict[str, Tensor]) -> Rows:
    weights = batch.get("rollout_is_weights", torch.ones_like(batch["advantages"]))
    return [
        [
            {
                "log_prob": log_probs[i, t],
                "old": batch["old_log_probs"][i, t].item(),
                "advantage": batch["advantages"][i, t].item(),
                "weight": weights[i, t].item(),
            }
            for t in range(log_probs.shape[1])
            if batch["response_mask"][i, t]
        ]
        for i in range(log_probs.shape[0])
    ]


def reduced(losses: list[list[Tensor]], aggregation: str, scale: float | None = None) -> Tensor:
    rows = [row for row in losses if row]
    total = sum((x for row in rows for x in row), start=ZERO)
    if aggregation == "token-mean":
        return total / sum(len(row) for row in rows)
    if aggregation == "seq-mean-token-sum":
        return total / len(rows)
    if aggregation == "seq-mean-token-sum-norm":
        assert scale is not None
        return total / len(rows) / scale
    assert aggregation == "seq-mean-token-mean"
    return sum((sum(row, start=ZERO) / len(row) for row in rows), start=ZERO) / len(rows)


def of_tokens(loss: Callable[..., Tensor], default: str = "token-mean") -> Callable[..., Tensor]:
    def whole(rows: Rows, *, aggregation: str = default, scale: float | None = None, **options: Any) -> Tensor:
        return reduced([[x["weight"] * loss(x, **options) for x in row] for row in rows], aggregation, scale)

    return whole


def ratio(x: Token) -> Tensor:
    return torch.exp(x["log_prob"] - x["old"])


def ppo(x: Token, low: float, high: float) -> tuple[Tensor, bool]:
    """The loss of a token, and whether clipping cut it."""
    r, a = ratio(x), x["advantage"]
    if a >= 0 and r > 1 + high:
        return -a * (1 + high) + 0 * r, True
    if a < 0 and r < 1 - low:
        return -a * (1 - low) + 0 * r, True
    return -a * r, False


def gspo(rows: Rows, clip_low: float, clip_high: float) -> Tensor:
    losses: list[list[Tensor]] = []
    for row in rows:
        s = math.exp(sum(x["log_prob"].item() - x["old"] for x in row) / max(len(row), 1))
        losses.append([])
        for x in row:  # the value of the sequence's ratio, the gradient of the token's own
            s_t = s * x["log_prob"].exp() / x["log_prob"].detach().exp()
            a = x["advantage"]
            if (a >= 0 and s > 1 + clip_high) or (a < 0 and s < 1 - clip_low):
                s_t = (1 + clip_high if a >= 0 else 1 - clip_low) + 0 * s_t
            losses[-1].append(-x["weight"] * a * s_t)
    return reduced(losses, "seq-mean-token-mean")


def gmpo(rows: Rows, clip_low: float, clip_high: float) -> Tensor:
    total, sequences = ZERO, 0
    for row in rows:
        if not row:
            continue
        product, weight = torch.ones((), dtype=torch.float64), 1.0
        for x in row:
            r = ratio(x)
            cut = r.clamp(max=math.exp(clip_high)) if x["advantage"] >= 0 else r.clamp(min=math.exp(-clip_low))
            product, weight = product * cut, weight * x["weight"]
        advantage = sum(x["advantage"] for x in row) / len(row)
        total = total - weight ** (1 / len(row)) * advantage * product ** (1 / len(row))
        sequences += 1
    return total / sequences


def cispo(x: Token, clip_low: float, clip_high: float) -> Tensor:
    weight = min(max(ratio(x).item(), 1 - clip_low), 1 + clip_high)
    return -weight * x["advantage"] * x["log_prob"]


def sapo(x: Token, tau_pos: float, tau_neg: float) -> Tensor:
    tau = tau_pos if x["advantage"] > 0 else tau_neg
    return -x["advantage"] * (4 / tau) / (1 + torch.exp(-tau * (ratio(x) - 1)))


def covariances(rows: Rows) -> list[list[float]]:
    tokens = [x for row in rows for x in row]
    mean_advantage = sum(x["advantage"] for x in tokens) / len(tokens)
    mean_log_prob = sum(x["log_prob"].item() for x in tokens) / len(tokens)
    return [[(x["advantage"] - mean_advantage) * (x["log_prob"].item() - mean_log_prob) for x in row] for row in rows]


def kl_cov(rows: Rows, cov_fraction: float, cov_kl_coef: float) -> Tensor:
    covs = covariances(rows)
    ranked = sorted((c for row in covs for c in row), reverse=True)
    border = ranked[max(int(cov_fraction * len(ranked)), 1) - 1]
    losses: list[list[Tensor]] = []
    for row, row_covs in zip(rows, covs):
        losses.append([])
        for x, c in zip(row, row_covs):
            loss = -x["advantage"] * ratio(x)
            if c >= border:
                loss = loss + cov_kl_coef * (x["log_prob"] - x["old"]).abs()
            losses[-1].append(x["weight"] * loss)
    return reduced(losses, "token-mean")


def dro(rows: Rows, beta: float, level: str, aggregation: str) -> Tensor:
    losses: list[list[Tensor]] = []
    for row in rows:
        of_row = sum((x["log_prob"] - x["old"] for x in row), start=ZERO)
        losses.append([])
        for x in row:
            square = of_row**2 / len(row) if level == "sequence" else (x["log_prob"] - x["old"]) ** 2
            losses[-1].append(x["weight"] * (-x["advantage"] * x["log_prob"] + beta / 2 * square))
    return reduced(losses, aggregation)


PLAIN: dict[str, Callable[..., Tensor]] = {
    "gspo": gspo,
    "gmpo": gmpo,
    "cispo": of_tokens(cispo),
    "sapo": of_tokens(sapo, "seq-mean-token-mean"),
    "gpg": of_tokens(lambda x: -x["advantage"] * x["log_prob"]),
    "kl_cov": kl_cov,
    "dro": dro,
}
