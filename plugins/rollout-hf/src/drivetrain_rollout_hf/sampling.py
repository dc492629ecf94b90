"""Drawing a token for each row: temperature, then top-k, top-p and min-p, then the inverse of the distribution.

The order is transformers': each filter works on the renormalised rest of the one before. Tokens whose logit equals the
last one kept are kept too, so that the outcome does not hang on how a sort breaks ties.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from drivetrain import SamplingParams

_BLOCK = 64


@dataclass(frozen=True, kw_only=True)
class SamplingColumns:
    """The parameters of all rows, as columns ``(rows, 1)``, or ``(1, 1)`` when all rows have the same.

    Greedy rows have neutral values everywhere: their log-probs are those of the plain softmax.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    greedy: Tensor
    tempers: bool
    any_greedy: bool
    all_greedy: bool
    largest_k: int
    any_top_p: bool
    any_min_p: bool

    @staticmethod
    def of(rows: Sequence[SamplingParams], vocabulary: int, device: torch.device) -> SamplingColumns:
        """Collect the parameters of the rows.

        ``largest_k`` is how many of the most likely tokens have to be known to filter every row; 0 for none.
        """
        if len(set(rows)) == 1:
            rows = rows[:1]
        greedy = [row.temperature == 0 for row in rows]
        top_k = [0 if still or row.top_k >= vocabulary else row.top_k for row, still in zip(rows, greedy)]
        top_p = [1.0 if still else row.top_p for row, still in zip(rows, greedy)]
        min_p = [0.0 if still else row.min_p for row, still in zip(rows, greedy)]
        temperature = [1.0 if still else row.temperature for row, still in zip(rows, greedy)]
        needed = [k or (vocabulary if p < 1 else 0) for k, p in zip(top_k, top_p)]

        def column(values: Sequence[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)[:, None]

        return SamplingColumns(
            temperature=column(temperature, torch.float32),
            top_k=column(top_k, torch.int64),
            top_p=column(top_p, torch.float32),
            min_p=column(min_p, torch.float32),
            greedy=column(greedy, torch.bool),
            tempers=any(value != 1 for value in temperature),
            any_greedy=any(greedy),
            all_greedy=all(greedy),
            largest_k=max(needed),
            any_top_p=any(value < 1 for value in top_p),
            any_min_p=any(value > 0 for value in min_p),
        )

    def select(self, rows: Tensor) -> SamplingColumns:
        """The columns of some rows, ``(rows,)`` of indices."""
        if len(self.temperature) == 1:
            return self
        tensors = {name: value[rows] for name, value in vars(self).items() if isinstance(value, Tensor)}
        return SamplingColumns(**{**vars(self), **tensors})


def draw(logits: Tensor, columns: SamplingColumns, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one token for each row.

    Args:
        logits: ``(rows, vocabulary)``; minus infinity for what must not be drawn.
        columns: parameters of the rows.
        uniform: float64 ``(rows,)`` in ``[0, 1)``.

    Returns:
        tokens int64 ``(rows,)``, and float32 ``(rows,)`` the log-probability of each under the distribution that it
        was drawn from. A greedy token (temperature 0) has the one of the softmax at temperature 1.
    """
    logits = logits.float()
    tempered = logits / columns.temperature if columns.tempers else logits
    if columns.largest_k or columns.any_min_p:
        tempered = truncate(tempered, columns)
    probabilities = torch.softmax(tempered, dim=-1)
    if columns.all_greedy:
        tokens = logits.argmax(dim=-1)
    else:
        tokens = invert(probabilities, uniform)
        if columns.any_greedy:
            tokens = torch.where(columns.greedy[:, 0], logits.argmax(dim=-1), tokens)
    return tokens, probabilities.gather(1, tokens[:, None])[:, 0].log()


def truncate(logits: Tensor, columns: SamplingColumns) -> Tensor:
    """Put minus infinity for tokens that top-k, top-p or min-p leave out, as one threshold for each row."""
    threshold = torch.full_like(logits[:, :1], -torch.inf)
    if columns.largest_k:
        ordered = logits.topk(columns.largest_k, dim=-1).values
        limit = torch.where(columns.top_k > 0, columns.top_k, logits.shape[-1])
        places = torch.arange(columns.largest_k, device=logits.device)
        ordered = ordered.masked_fill(places >= limit, -torch.inf)
        last = ordered.gather(1, (columns.top_k - 1).clamp(min=0).expand(len(logits), 1))
        threshold = torch.where(columns.top_k > 0, last, threshold)
        if columns.any_top_p:
            share = torch.softmax(ordered, dim=-1)
            reached_before = share.cumsum(dim=-1) - share
            kept = (reached_before < columns.top_p).sum(dim=-1, keepdim=True).clamp(min=1)
            threshold = torch.where(columns.top_p < 1, torch.maximum(threshold, ordered.gather(1, kept - 1)), threshold)
    if columns.any_min_p:
        threshold = torch.maximum(threshold, logits.amax(dim=-1, keepdim=True) + columns.min_p.log())
    return logits.masked_fill(logits < threshold, -torch.inf)


def invert(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """The first token at which the cumulated probability exceeds ``uniform``; never one of probability zero.

    The sum runs over blocks of the vocabulary first and then inside one block, in float64: one pass over the
    vocabulary at the speed of memory, in place of a running sum over it.

    Args:
        probabilities: float32 ``(rows, vocabulary)``.
        uniform: float64 ``(rows,)``.

    Returns:
        int64 ``(rows,)``.
    """
    rows, vocabulary = probabilities.shape
    if vocabulary % _BLOCK:
        probabilities = functional.pad(probabilities, (0, -vocabulary % _BLOCK))
    blocks = probabilities.view(rows, -1, _BLOCK)
    mass = blocks.sum(dim=-1).double()
    upto = mass.cumsum(dim=-1)
    block, target = _first_above(upto, uniform[:, None] * upto[:, -1:])
    rest = target - (upto.gather(1, block) - mass.gather(1, block))
    inside = blocks.gather(1, block[:, :, None].expand(rows, 1, _BLOCK))[:, 0].double().cumsum(dim=-1)
    place, _ = _first_above(inside, rest)
    return (block * _BLOCK + place)[:, 0].clamp(max=vocabulary - 1)


def _first_above(cumulated: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Where each row first exceeds its target, and the target moved, if rounding asks, to where that exists."""
    last = cumulated[:, -1:]
    target = torch.minimum(target.clamp(min=0), torch.nextafter(last, torch.zeros_like(last)))
    place = torch.searchsorted(cumulated, target, right=True)
    return place.clamp(max=cumulated.shape[1] - 1), target  # NaN is above nothing
