"""Decoding: rows that each await their next token, and a forward call for all of them at once.

Between calls every row has one token that is drawn and not yet in the cache. Prompts are padded on the left. A prompt
goes through the model once, however many samples are drawn of it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache

from drivetrain import NonFiniteError, SamplingParams
from drivetrain_rollout_hf.cache import SlotCache
from drivetrain_rollout_hf.model import text_config
from drivetrain_rollout_hf.randomness import stream_keys, uniforms
from drivetrain_rollout_hf.sampling import SamplingColumns, draw
from drivetrain_rollout_hf.stopping import StopStrings

_MOST_SPARE_SLOTS = 256


@dataclass(eq=False, kw_only=True)
class Row:
    """One sample under way.

    Attributes:
        owner: whoever asked for it.
        stop_ids: tokens that end it.
        versions: spans ``(first token, version)`` of the weights.
    """

    owner: Any
    sample: int
    prompt: tuple[int, ...]
    seed: int
    sampling: SamplingParams
    stop_ids: frozenset[int]
    stop_strings: StopStrings | None = None
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    finish_reason: Literal["stop", "length", "abort"] | None = None

    def record(self, token: int, log_prob: float, version: int) -> None:
        """Append a token, and see whether the sample ends with it."""
        if not self.versions or self.versions[-1][1] != version:
            self.versions.append((len(self.tokens), version))
        self.tokens.append(token)
        self.log_probs.append(log_prob)
        drawn = len(self.tokens)
        may_stop = drawn >= self.sampling.min_tokens
        told = self.stop_strings is not None and self.stop_strings.push(token, armed=may_stop)
        if told or (may_stop and token in self.stop_ids):
            self.finish_reason = "stop"
        elif drawn >= self.sampling.max_tokens:
            self.finish_reason = "length"


@dataclass(frozen=True, kw_only=True)
class _Columns:
    """What the next call needs of each row, ``(rows,)``."""

    start: Tensor  # slot of the first token of the prompt
    keys: Tensor  # stream of random numbers
    drawn: Tensor  # tokens so far
    last: Tensor  # the token that is not in the cache yet

    def select(self, rows: Tensor) -> _Columns:
        return _Columns(**{name: value[rows] for name, value in vars(self).items()})

    def join(self, other: _Columns) -> _Columns:
        return _Columns(**{name: torch.cat([value, vars(other)[name]]) for name, value in vars(self).items()})


class Decoder:
    """Rows under way in one module.

    The module may be one that is being trained: nothing of it is changed, and no tensor made here is an inference
    tensor. Whoever calls sees to it that the module is in evaluation mode.
    """

    def __init__(self, module: nn.Module, version: Callable[[], int]) -> None:
        """Start without rows.

        Args:
            module: called as transformers' causal language models are.
            version: tells the version of the weights.
        """
        self.rows: list[Row] = []
        self._module = module
        self._version = version
        self._cache_argument = cache_argument(module)
        self._vocabulary: int = text_config(module).vocab_size
        self._device = next(module.parameters()).device
        self._cache: SlotCache | None = None
        self._columns: _Columns | None = None
        self._sampling: SamplingColumns | None = None
        self._padded = False

    @torch.no_grad()
    def admit(self, rows: Sequence[Row]) -> list[Row]:
        """Take rows in: compute their prompts, draw their first tokens; returns those that end with it."""
        self.drop_finished()
        distinct = {prompt: place for place, prompt in enumerate(dict.fromkeys(row.prompt for row in rows))}
        source = self._tensor([distinct[row.prompt] for row in rows])
        prompts, logits = self._prefill(list(distinct))

        if self._cache is None or self._columns is None:
            spare = min(max(row.sampling.max_tokens for row in rows), _MOST_SPARE_SLOTS)
            self._cache, held, drop = SlotCache(spare), None, 0
        else:
            drop = int(self._columns.start.min())
            held = self._columns
        length_before = self._cache.length
        self._cache.join(prompts, source, drop=drop)
        length = self._cache.length

        first = self._tensor([length - len(row.prompt) for row in rows])
        fresh = _Columns(
            start=first,
            keys=stream_keys((row.seed for row in rows), self._device),
            drawn=torch.zeros_like(first),
            last=torch.zeros_like(first),
        )
        sampling = SamplingColumns.of([row.sampling for row in rows], self._vocabulary, self._device)
        fresh = self._draw(rows, logits[source], fresh, sampling)
        if held is None:
            self._columns, self._sampling = fresh, sampling
        else:
            moved = _Columns(**{**vars(held), "start": held.start + (length - length_before)})
            self._columns = moved.join(fresh)
            everything = [row.sampling for row in (*self.rows, *rows)]
            self._sampling = SamplingColumns.of(everything, self._vocabulary, self._device)
        self.rows += rows
        self._padded = bool(self._columns.start.any())
        return [row for row in rows if row.finish_reason]

    @torch.no_grad()
    def step(self) -> list[Row]:
        """Draw one token for every row; returns those that end with it."""
        self.drop_finished()
        if self._cache is None or self._columns is None or self._sampling is None:
            return []
        columns, length = self._columns, self._cache.length
        mask = torch.arange(length + 1, device=self._device) >= columns.start[:, None] if self._padded else None
        logits = self._forward(columns.last[:, None], mask, (length - columns.start)[:, None], self._cache)
        self._columns = self._draw(self.rows, logits, columns, self._sampling)
        return [row for row in self.rows if row.finish_reason]

    def drop_finished(self) -> None:
        """Let go of the rows that have ended. The last rows take their places, so that few are copied."""
        ended = [place for place, row in enumerate(self.rows) if row.finish_reason]
        if not ended:
            return
        if len(ended) == len(self.rows) or self._columns is None or self._cache is None or self._sampling is None:
            self.clear()
            return
        left = len(self.rows) - len(ended)
        keep = list(range(left))
        movers = (place for place in range(left, len(self.rows)) if not self.rows[place].finish_reason)
        for hole in ended:
            if hole < left:
                keep[hole] = next(movers)
        rows = self._tensor(keep)
        self.rows = [self.rows[place] for place in keep]
        self._cache.keep(rows)
        self._columns = self._columns.select(rows)
        self._sampling = self._sampling.select(rows)

    def clear(self) -> None:
        """Let go of all rows and of their memory."""
        self.rows = []
        self._cache = self._columns = self._sampling = None

    def _prefill(self, prompts: list[tuple[int, ...]]) -> tuple[DynamicCache, Tensor]:
        """Compute distinct prompts; returns their keys and values, and the logits after each, (prompts, vocabulary)."""
        longest = max(map(len, prompts))
        tokens = self._tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
        start = self._tensor([longest - len(prompt) for prompt in prompts])[:, None]
        places = torch.arange(longest, device=self._device)
        ragged = any(len(prompt) != longest for prompt in prompts)
        cache = DynamicCache()
        logits = self._forward(tokens, places >= start if ragged else None, (places - start).clamp(min=0), cache)
        return cache, logits

    def _forward(self, tokens: Tensor, mask: Tensor | None, positions: Tensor, cache: Cache) -> Tensor:
        """Logits after the last token of each row, (rows, vocabulary)."""
        output = self._module(
            input_ids=tokens, attention_mask=mask, position_ids=positions, use_cache=True, logits_to_keep=1,
            **{self._cache_argument: cache},
        )  # fmt: skip
        logits: Tensor = output.logits[:, -1]
        return logits

    def _draw(self, rows: Sequence[Row], logits: Tensor, columns: _Columns, sampling: SamplingColumns) -> _Columns:
        """Draw a token for each row and record it."""
        early = [
            (place, token)
            for place, row in enumerate(rows)
            if len(row.tokens) + 1 < row.sampling.min_tokens
            for token in row.stop_ids
        ]
        if early:
            places, tokens = self._tensor(early).unbind(dim=1)
            logits = logits.index_put((places, tokens), logits.new_tensor(-torch.inf))
        drawn, log_probs = draw(logits, sampling, uniforms(columns.keys, columns.drawn))
        version = self._version()
        numbers = log_probs.tolist()
        if not math.isfinite(sum(numbers)):
            raise NonFiniteError("the model's logits are not finite", where="rollout", mend="look at the weights: an "
                                 "update may have diverged, or the dtype is too narrow")  # fmt: skip
        for row, token, log_prob in zip(rows, drawn.tolist(), numbers, strict=True):
            row.record(token, log_prob, version)
        return _Columns(start=columns.start, keys=columns.keys, drawn=columns.drawn + 1, last=drawn)

    def _tensor(self, values: Sequence[Any]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def cache_argument(module: nn.Module) -> str:
    """What the module's forward calls its cache: transformers renamed ``past_key_values`` to ``cache``.

    A wrapper may take any keyword, so the first module inside it that names one decides.
    """
    for part in module.modules():
        parameters = inspect.signature(part.forward).parameters
        for name in ("cache", "past_key_values"):
            if name in parameters:
                return name
    return "past_key_values"
