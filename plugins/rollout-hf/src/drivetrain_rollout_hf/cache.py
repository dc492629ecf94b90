"""A key-value cache that is allocated ahead, and in which rows come and go.

All rows end at the same slot, so that a token of every row is written as one slice; a row with a shorter prompt starts
at a later slot. transformers' dynamic cache copies everything at every token; this one copies when it is full, when
rows join, and, when rows leave, as many rows as left.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer, ``(rows, heads, slots, head size)``; the first ``length`` slots are written."""

    is_sliding = False
    keys: Tensor  # type: ignore[assignment]
    values: Tensor  # type: ignore[assignment]

    def __init__(self, keys: Tensor, values: Tensor, spare: int) -> None:
        """Make a layer without rows, for keys and values like these, with ``spare`` slots ahead."""
        super().__init__()
        self.keys, self.values = keys[:0], values[:0]
        self.spare = spare
        self.length = 0
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: rows are allocated when they join."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write the next slots of all rows; returns everything that is written."""
        end = self.length + key_states.shape[2]
        if end > self.keys.shape[2]:
            self._allocate(len(self.keys), self.length, drop=0, slots=end + max(self.spare, self.length // 2))
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def join(self, keys: Tensor, values: Tensor, source: Tensor, *, drop: int) -> None:
        """Append rows whose prompts have been computed, and leave out the first ``drop`` slots, which nobody reads."""
        held, fresh, prompt = len(self.keys), len(source), keys.shape[2]
        length = max(self.length - drop, prompt)
        self._allocate(held + fresh, length, drop=drop, slots=length + self.spare)
        for storage, new in ((self.keys, keys), (self.values, values)):
            storage[held:, :, : length - prompt] = 0
            storage[held:, :, length - prompt : length] = new[source]
        self.length = length

    def _allocate(self, rows: int, length: int, *, drop: int, slots: int) -> None:
        """Move what is written into new storage, so that it ends at slot ``length``."""
        begin = length - (self.length - drop)
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_empty(rows, old.shape[1], slots, old.shape[3])
            new[: len(old), :, begin:length] = old[:, :, drop : self.length]
            new[: len(old), :, :begin] = 0
            setattr(self, name, new)

    def move(self, to: Tensor, source: Tensor, rows: int) -> None:
        """Copy some rows over others, and let go of all but the first ``rows``."""
        for name in ("keys", "values"):
            storage = getattr(self, name)
            if len(to):
                storage[to, :, : self.length] = storage[source, :, : self.length]
            setattr(self, name, storage[:rows])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and first slot of what attention will see."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Slots that are written."""
        return self.length

    def get_max_length(self) -> int:
        """No maximum."""
        return -1


class SlotCache(Cache):
    """The layers' keys and values of all rows under way."""

    def __init__(self, spare: int) -> None:
        """Make an empty cache.

        Args:
            spare: slots that are allocated ahead.
        """
        super().__init__(layers=[])
        self.spare = spare

    @property
    def length(self) -> int:
        """Slots that are written."""
        return self.get_seq_length()

    def join(self, prompts: DynamicCache, source: Tensor, *, drop: int) -> None:
        """Append one row for each index of ``source`` into ``prompts``; see :meth:`SlotLayer.join`."""
        if not self.layers:
            self.layers += [SlotLayer(*_written(prompt), self.spare) for prompt in prompts.layers]
        for layer, prompt in zip(self._slot_layers(), prompts.layers, strict=True):
            layer.join(*_written(prompt), source, drop=drop)

    def keep(self, rows: Tensor) -> None:
        """Keep the rows ``rows``, in that order; it is cheap where a row stays in its place."""
        moved = torch.nonzero(rows != torch.arange(len(rows), device=rows.device))[:, 0]
        for layer in self._slot_layers():
            layer.move(moved, rows[moved], len(rows))

    def _slot_layers(self) -> list[SlotLayer]:
        return cast(list[SlotLayer], self.layers)


def _written(layer: object) -> tuple[Tensor, Tensor]:
    """Keys and values of a layer of the dynamic cache that prompts were computed into."""
    dynamic = cast(DynamicLayer, layer)
    return cast(Tensor, dynamic.keys), cast(Tensor, dynamic.values)
