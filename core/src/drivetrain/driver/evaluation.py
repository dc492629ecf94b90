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
    ``eval/reward`` is the mean weighted reward. With n completions of a prompt, ``eval/mean@n`` is the accuracy over
    them, and ``eval/pass@k`` the chance that one of k is right (:func:`pass_at_k`), for k = 1, 2, 4, ... and n. All
    of these come by ``data_source`` too when there are several.
    """
    settings = session.run.trainer.eval
    assert session.eval_prompts is not None
    numbers: dict[str, list[torch.Tensor]] = defaultdict(list)  # (completions,), those of a prompt together
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
    columns = {name: torch.cat(parts).double() for name, parts in numbers.items()}
    if bool(columns["accuracy"].isnan().any()):
        del columns["accuracy"]  # no reward of this run judges right and wrong
    metrics = {f"eval/{name}": float(column.mean()) for name, column in columns.items()}
    shares = {name: column for name, column in columns.items() if name in ("accuracy", "reward")}
    metrics |= _of_several(shares, "eval", settings.samples)
    names = sorted(set(sources)) if len(set(sources)) > 1 else ()
    for source in names:
        rows = torch.tensor([s == source for s in sources])
        part = {name: column[rows] for name, column in shares.items()}
        metrics |= {f"eval/{source}/{name}": float(column.mean()) for name, column in part.items()}
        metrics |= _of_several(part, f"eval/{source}", settings.samples)
    return Evaluation(metrics, samples)


def _of_several(columns: Mapping[str, torch.Tensor], prefix: str, samples: int) -> dict[str, float]:
    """What several completions of a prompt tell; nothing for one, or where nothing judges right and wrong."""
    if samples == 1 or "accuracy" not in columns:
        return {}
    correct = columns["accuracy"].view(-1, samples)
    sizes = [*(2**power for power in range(samples.bit_length()) if 2**power < samples), samples]
    return {f"{prefix}/mean@{samples}": float(correct.mean())} | {
        f"{prefix}/pass@{k}": float(pass_at_k(correct, k).mean()) for k in sizes
    }


def pass_at_k(correct: torch.Tensor, k: int) -> torch.Tensor:
    """Chance that at least one of k completions is right, estimated without bias from n of them.

    ``1 - C(n - c, k) / C(n, k)`` where c of n are right: Chen et al. 2021 (arXiv 2107.03374), equation 1.

    Args:
        correct: 0 or 1 (prompts, n).
        k: at most n.

    Returns:
        (prompts,)
    """
    n = correct.shape[1]
    drawn = torch.arange(k)
    wrong = n - correct.sum(dim=1, keepdim=True)
    return 1 - ((wrong - drawn).clamp(min=0) / (n - drawn)).prod(dim=1)


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
