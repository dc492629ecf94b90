"""SPPO on a tiny Llama, written out in plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drivetrain import DataProto, RunConfig
from drivetrain.testing import tiny
from drivetrain.testing.tiny import assert_same, config, judged_by, opened, plain_model

__all__ = ["assert_same", "config", "judged_by", "opened", "plain_model"]

REWARD = """
def variety(response: str) -> float:
    return float(len(set(response)))


def share(response: str) -> float:
    return len(set(response)) / 10


def constant(response: str) -> float:
    return 0.25
"""


def write_run(folder: Path) -> Path:
    """A run of SPPO with two mini-batches a step."""
    algorithm = {"name": "sppo", "group_size": 3, "eta": 4.0}
    return tiny.write_run(
        folder, algorithm, backend="fsdp", optimizer="adamw", rollout="hf", judge=REWARD, mini_batch_prompts=2
    )


def prompts_of_updates(made: tiny.Opened, batch: DataProto) -> list[list[str]]:
    """The prompts of each mini-batch, epoch after epoch."""
    rows = made.rows_of_updates(batch)
    return [list(dict.fromkeys(batch["uid"][part].tolist())) for part in rows]


def plain_log_probs(model: Any, batch: DataProto, row: int) -> Tensor:
    """Log-probability of the tokens of one response, (tokens,), of a row without its padding."""
    real = batch["attention_mask"][row] == 1
    tokens = batch["input_ids"][row][real]
    length = int(batch["response_mask"][row].sum())
    log_p = model(input_ids=tokens[None]).logits[0, :-1].log_softmax(-1)
    return log_p.gather(1, tokens[1:, None])[-length:, 0]


def plain_win_rate(score: float, others: Sequence[float], preference: str, temperature: float = 1.0) -> float:
    """The mean win probability over the samples of a prompt, oneself among them."""
    total = 0.0
    for other in others:
        if preference == "bradley_terry":
            total += 1 / (1 + math.exp((other - score) / temperature))
        elif score > other:
            total += 1.0
        elif score == other:
            total += 0.5
    return total / len(others)


def learn_plainly(run: RunConfig, batch: DataProto, updates: Sequence[Sequence[str]], targets: Mapping[int, float]
                  ) -> dict[str, Tensor]:  # fmt: skip
    """The weights after one AdamW step a mini-batch; `targets` are the win probabilities of the rows learnt."""
    model = plain_model(run.model.path)
    with torch.no_grad():
        opponent = {row: plain_log_probs(model, batch, row).sum() for row in targets}
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.actor.optimizer.lr, eps=1e-3, weight_decay=0.0)
    for prompts in updates:
        rows = [row for row in targets if batch["uid"][row] in prompts]
        optimizer.zero_grad()
        loss = torch.zeros(())
        for row in rows:
            log_ratio = plain_log_probs(model, batch, row).sum() - opponent[row]
            loss = loss + (log_ratio - run.algorithm.eta * (targets[row] - 0.5)) ** 2 / len(rows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), run.actor.max_grad_norm)
        optimizer.step()
    return dict(model.named_parameters())
