"""The losses of pairs on a tiny Llama, written out row by row."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drivetrain import DataProto, RunConfig
from drivetrain.testing import tiny
from drivetrain.testing.tiny import assert_same, config, distance, opened, plain_model

__all__ = ["assert_same", "config", "distance", "opened", "plain_model"]

REWARD = """
def length(response: str) -> float:
    return float(len(response))


def fussy(response: str, prompt: str) -> float:
    return float(len(response)) if prompt in ("1=", "456=") else 0.5
"""
PAIRS = [("1=", "12", "3"), ("23=", "4", "567"), ("456=", "8", "9"), ("7890=", "123", "45")]


def write_run(folder: Path) -> Path:
    """A run of DPO against another model, with pairs of unequal length and two mini-batches a step."""
    records = [{"prompt": p, "chosen": y, "rejected": n, "note": "x"} for p, y, n in PAIRS]
    folder.mkdir(exist_ok=True)
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in records))
    train = {"name": "jsonl", "path": str(folder / "pairs.jsonl"), "answer_key": None, "response_key": "chosen",
             "rejected_key": "rejected"}  # fmt: skip
    return tiny.write_run(
        folder, {"name": "dpo", "beta": 0.5}, backend="fsdp", optimizer="adamw", rollout="hf", judge=REWARD,
        mini_batch_prompts=2, data={"batch_prompts": 4, "train": train},
        ref={"backend": {"name": "fsdp"}, "model": {"path": str(folder / "other")}},
    )  # fmt: skip


def plain_log_probs(model: Any, batch: DataProto, temperature: float = 1.0) -> list[Tensor]:
    """Of each row, the log-probs of the response's tokens, by a call of the model on that row alone."""
    rows = []
    for row in range(len(batch)):
        ids = batch["input_ids"][row][batch["attention_mask"][row] == 1]
        answer = batch["responses"][row][batch["response_mask"][row] == 1]
        log_p = (model(input_ids=ids[None]).logits[0] / temperature).log_softmax(-1)
        start = int(batch["attention_mask"][row][: batch["prompts"].shape[1]].sum()) - 1
        rows.append(torch.stack([log_p[start + at, token] for at, token in enumerate(answer.tolist())])
                    if len(answer) else log_p[0, :0])  # fmt: skip
    return rows


def pair_loss(margin: Tensor, beta: float, kind: str, smoothing: float = 0.0) -> Tensor:
    if kind == "sigmoid":
        sigma = 1 / (1 + torch.exp(-beta * margin))
        return -(1 - smoothing) * torch.log(sigma) - smoothing * torch.log(1 - sigma)
    if kind == "ipo":
        return (margin - 1 / (2 * beta)) ** 2
    return 1 - beta * margin if 1 - beta * margin > 0 else 0 * margin


def mean_over_pairs(log_ratios: Sequence[Tensor], better: Sequence[tuple[int, int]], **options: Any) -> Tensor:
    """The mean loss of pairs ``(better row, worse row)``; a log-ratio is a number a token."""
    total: Any = 0.0
    for won, lost in better:
        total = total + pair_loss(log_ratios[won].sum() - log_ratios[lost].sum(), **options)
    return total / len(better)


def learn_plainly(
    run: RunConfig, pairs: DataProto, updates: Sequence[Sequence[int]], alive: Callable[[int], bool] = lambda row: True
) -> dict[str, Tensor]:
    """The weights after one AdamW step a mini-batch of pairs, whose rows 2k and 2k + 1 are better and worse."""
    model = plain_model(run.model.path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.actor.optimizer.lr, eps=1e-3, weight_decay=0.0)
    c = run.algorithm
    options = {"beta": c.beta, "kind": getattr(c, "kind", "sigmoid"), "smoothing": getattr(c, "label_smoothing", 0.0)}
    temperature = run.rollout.temperature if c.name != "dpo" else 1.0
    for rows in updates:
        better = [(row, row + 1) for row in rows if row % 2 == 0 and alive(row)]
        if not better:
            continue
        optimizer.zero_grad()
        log_probs = plain_log_probs(model, pairs, temperature)
        mask = pairs["response_mask"] == 1
        ratios = [p - ref[m] for p, ref, m in zip(log_probs, pairs["ref_log_probs"], mask)]
        mean_over_pairs(ratios, better, **options).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), run.actor.max_grad_norm or math.inf)
        optimizer.step()
    return dict(model.named_parameters())
