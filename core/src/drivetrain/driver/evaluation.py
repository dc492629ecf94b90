"""Answers to held-out prompts, and how good they are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from drivetrain.driver.session import Session
from drivetrain.driver.stats import reward_columns
from drivetrain.driver.text import decode_responses
from drivetrain.protocol import DataProto

SAMPLES_KEPT = 64


@dataclass(frozen=True)
class Evaluation:
    """Metrics named ``eval/...``, and the first samples in the order of the dataset."""

    metrics: Mapping[str, float]
    samples: Sequence[Mapping[str, Any]]


def evaluate(session: Session) -> Evaluation:
    """Answer every prompt of ``data.eval`` and score the answers.

    ``eval/accuracy`` is the share of completions that a reward with a notion of right and wrong calls right;
    ``eval/reward`` is the mean weighted reward; both also by ``data_source`` when there are several.
    """
    settings = session.run.trainer.eval
    assert session.eval_prompts is not None
    numbers: dict[str, list[torch.Tensor]] = defaultdict(list)
    sources: list[str] = []
    samples: list[Mapping[str, Any]] = []
    for prompts in session.eval_prompts.all_batches(settings.batch_prompts):
        batch = session.roles.rollout.generate(
            prompts, samples=settings.samples, temperature=settings.temperature, phase="evaluate"
        )
        with session.phases("evaluate"):
            batch = session.rewards.score(batch)
        sources += batch.non_tensor_batch["data_source"].tolist()
        numbers["accuracy"].append(batch["correct"])
        numbers["response_tokens"].append(batch["response_mask"].sum(dim=1).float())
        for name, column in reward_columns(batch).items():
            numbers[name].append(column)
        samples += _rows(batch, session, SAMPLES_KEPT - len(samples))
    metrics: dict[str, float] = {}
    names = sorted(set(sources))
    for name, parts in numbers.items():
        column = torch.cat(parts)
        if name == "accuracy" and bool(column.isnan().any()):
            continue  # no reward of this run judges right and wrong
        metrics[f"eval/{name}"] = float(column.double().mean())
        if len(names) > 1 and name in ("accuracy", "reward"):
            for source in names:
                rows = torch.tensor([s == source for s in sources])
                metrics[f"eval/{source}/{name}"] = float(column[rows].double().mean())
    return Evaluation(metrics, samples)


def _rows(batch: DataProto, session: Session, count: int) -> list[dict[str, Any]]:
    if count <= 0:
        return []
    batch = batch[:count]
    columns = batch.non_tensor_batch
    return [
        {
            "prompt": str(columns["raw_prompt"][row]),
            "response": text,
            "answer": columns["answer"][row],
            "score": float(batch["scores"][row]),
            "correct": None if batch["correct"][row].isnan() else bool(batch["correct"][row]),
            "data_source": str(columns["data_source"][row]),
            "finish_reason": str(columns["finish_reason"][row]),
        }
        for row, text in enumerate(decode_responses(batch, session.tokenizer))
    ]
