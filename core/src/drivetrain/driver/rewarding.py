"""Scoring: all rewards of a run over one batch. A reward that fails stops the run; it never counts as zero."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch

from drivetrain.background import start_daemon
from drivetrain.builtin.per_sample import SampleError
from drivetrain.contracts.data import Reward, RewardSample, Score
from drivetrain.contracts.placement import WorkerGroup
from drivetrain.driver.text import decode_tokens, response_tokens
from drivetrain.errors import RewardError, UserError
from drivetrain.protocol import DataProto

_shorten = reprlib.Repr()
_shorten.maxstring = 100


@dataclass(frozen=True, kw_only=True)
class PanelReward:
    """One reward of a run: its label in metrics, its factor in the sum, and its seconds for a batch."""

    label: str
    reward: Reward
    weight: float = 1.0
    timeout_s: float = 60.0


class ModelReward:
    """The score of a reward model, by the workers that play it."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group

    def __call__(self, samples: Sequence[RewardSample]) -> list[Score]:
        """One score a sample, in order; it says nothing about right and wrong."""
        texts = {name: [getattr(s, name) for s in samples] for name in ("prompt", "messages", "response")}
        scored: DataProto = self._group.call("compute_rm_score", DataProto.from_dict({}, texts))
        return [Score(value) for value in scored["rm_scores"].tolist()]


class RewardPanel:
    """The weighted sum of some rewards."""

    def __init__(self, rewards: Sequence[PanelReward], tokenizer: Any) -> None:
        """Raises UserError when two rewards have one label."""
        labels = [entry.label for entry in rewards]
        if twice := {label for label in labels if labels.count(label) > 1}:
            raise UserError(f"two rewards are called {sorted(twice)[0]!r}", where="rewards", mend="give each a label")
        self._rewards, self._tokenizer = tuple(rewards), tokenizer

    def __len__(self) -> int:
        return len(self._rewards)

    def score(self, batch: DataProto) -> DataProto:
        """Judge every row.

        Adds ``reward/<label>`` ``(batch,)``, each reward before its weight; ``scores`` ``(batch,)``, their weighted
        sum; ``token_level_scores`` ``(batch, response)``, that sum at the last token where ``response_mask`` is 1
        (a row without such a token has it in ``scores`` only); and ``correct`` ``(batch,)``: 1 if every reward that
        judges correctness says so, 0 if one denies it, NaN if none judges. All are float32.

        Raises:
            RewardError: a reward raised, took longer than its ``timeout_s``, or returned something that is no score.
        """
        samples = self._samples(batch)
        columns = {}
        total = torch.zeros(len(samples), dtype=torch.float64)
        correct = torch.full((len(samples),), math.nan)
        for entry in self._rewards:
            scores = _judge(entry, samples)
            values = torch.tensor([score.value for score in scores], dtype=torch.float64)
            judged = [math.nan if score.correct is None else float(score.correct) for score in scores]
            total += entry.weight * values
            correct = torch.fmin(correct, torch.tensor(judged))
            columns[f"reward/{entry.label}"] = values.float()
        mask = batch["response_mask"].bool()
        token_level = torch.zeros(mask.shape)
        rows = mask.any(dim=1).nonzero()[:, 0]
        last = mask.shape[1] - 1 - mask[rows].flip(1).int().argmax(dim=1)
        token_level[rows, last] = total[rows].float()
        return batch.with_columns(**columns, scores=total.float(), correct=correct, token_level_scores=token_level)

    def _samples(self, batch: DataProto) -> list[RewardSample]:
        names = ("raw_prompt", "messages", "uid", "finish_reason", "answer", "data_source", "extra")
        drawn = response_tokens(batch)
        rows = zip(decode_tokens(drawn, self._tokenizer), drawn, *(batch[name] for name in names), strict=True)
        return [
            RewardSample(prompt=prompt, messages=messages, uid=str(uid), response=response, response_token_ids=tokens,
                         finish_reason=finish, answer=answer, data_source=source, extra=extra)
            for response, tokens, prompt, messages, uid, finish, answer, source, extra in rows
        ]  # fmt: skip


def _judge(entry: PanelReward, samples: list[RewardSample]) -> list[Score]:
    """The reward's scores, checked."""
    result: list[Any] = []
    raised: list[BaseException] = []

    def call() -> None:
        try:
            result.append(entry.reward(samples))
        except BaseException as error:
            raised.append(error)

    # A thread cannot be ended; as a daemon it does not keep the process that reports the timeout alive.
    thread = start_daemon(call, f"reward {entry.label}")
    thread.join(entry.timeout_s)
    if raised:
        sample = samples[raised[0].index] if isinstance(raised[0], SampleError) else None
        cause = raised[0].__cause__ if isinstance(raised[0], SampleError) else raised[0]
        raise _failure(entry, f"raised {type(cause).__name__}: {cause}", sample) from cause
    if not result:
        raise _failure(entry, f"took longer than timeout_s={entry.timeout_s:g} for {len(samples)} samples")
    if not isinstance(result[0], Sequence):
        raise _failure(entry, f"returned {_shorten.repr(result[0])}, not a list of scores")
    if len(result[0]) != len(samples):
        raise _failure(entry, f"returned {len(result[0])} scores for {len(samples)} samples")
    return [_score(entry, value, sample) for value, sample in zip(result[0], samples, strict=True)]


def _score(entry: PanelReward, value: object, sample: RewardSample) -> Score:
    if isinstance(value, bool):
        return Score(float(value), correct=value)
    score = Score(float(value)) if isinstance(value, Real) else value
    if not isinstance(score, Score) or not isinstance(score.value, Real):
        raise _failure(entry, f"returned {_shorten.repr(value)}, which is no score", sample)
    if not math.isfinite(score.value):
        raise _failure(entry, f"returned {score.value}, which is not finite", sample)
    return score


def _failure(entry: PanelReward, cause: str, sample: RewardSample | None = None) -> RewardError:
    shown = ("prompt", "response", "answer", "finish_reason")
    text = ", ".join(f"{name} {_shorten.repr(getattr(sample, name))}" for name in shown) if sample else ""
    return RewardError(entry.label, cause, sample=text)
