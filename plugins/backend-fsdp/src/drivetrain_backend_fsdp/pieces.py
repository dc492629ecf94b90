"""Where the contents of a sharded model's tensors come from: some rows of a tensor at a time."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose, WeightConverter

if TYPE_CHECKING:
    from typing import Protocol

    Place = tuple[nn.Module, str]  # where a tensor is registered, which wrappers and sharding leave as it is
    Span = tuple[int, int]  # rows from, up to

    class Piece(Protocol):
        """Where the contents of one or several tensors come from."""

        places: Sequence[Place]

        def rows(self, spans: Sequence[Span], device: torch.device) -> Sequence[Tensor]:
            """Some rows of each tensor."""


@dataclass
class Stored:
    """A tensor of a file."""

    places: Sequence[Place]
    stored: Any  # a slice of safetensors

    def rows(self, spans: Sequence[Span], device: torch.device) -> Sequence[Tensor]:
        ((start, stop),) = spans
        return [self.stored[start:stop] if self.stored.get_shape() else self.stored[...]]


@dataclass
class Given:
    """A tensor that is there."""

    places: Sequence[Place]
    tensor: Tensor

    def rows(self, spans: Sequence[Span], device: torch.device) -> Sequence[Tensor]:
        ((start, stop),) = spans
        return [self.tensor[start:stop]]


@dataclass
class Converted:
    """What transformers makes of several tensors of files, or several tensors of what it makes of one."""

    model: PreTrainedModel
    converter: WeightConverter
    first: str
    shape: torch.Size  # of the first
    places: Sequence[Place] = ()
    names: Sequence[str] = ()
    sources: list[tuple[str, str, Any]] = field(default_factory=list)  # pattern, name in the folder, slice

    def names_made(self) -> list[str]:
        """Names in the model of what is made."""
        targets = self.converter.target_patterns
        return [self.first.replace(targets[0], target) for target in targets]

    def rows(self, spans: Sequence[Span], device: torch.device) -> Sequence[Tensor]:
        if all(start == stop for start, stop in spans):
            return [torch.empty(0)] * len(spans)
        chosen, stacked = self.sources, self._stacks_rows()
        if stacked:
            ((start, stop),) = spans
            chosen = [source for pattern in self._patterns() for source in self._of(pattern)[start:stop]]
        converter = deepcopy(self.converter)
        for pattern, name, stored in chosen:
            converter.add_tensor(self.first, name, pattern, stored[...])
        made = cast(Any, converter).convert(self.first, model=self.model, config=self.model.config)
        results = []
        for name, (start, stop) in zip(self.names, spans, strict=True):
            whole = made[name][0] if isinstance(made[name], list) else made[name]
            results.append(whole if stacked else whole[start:stop])
        return results

    def _patterns(self) -> list[str]:
        return list(dict.fromkeys(pattern for pattern, _, _ in self.sources))

    def _of(self, pattern: str) -> list[tuple[str, str, Any]]:
        return [source for source in self.sources if source[0] == pattern]

    def _stacks_rows(self) -> bool:
        """Whether row i is made of the i-th tensor of each kind, as experts are stacked, others aside."""
        stack, *after = self.converter.operations
        return (
            isinstance(stack, MergeModulelist)
            and stack.dim == 0
            and len(self.names) == 1
            and all(len(self._of(pattern)) == self.shape[0] for pattern in self._patterns())
            and all(
                (isinstance(op, Concatenate) and op.dim > 0) or (isinstance(op, Transpose) and op.dim0 * op.dim1 > 0)
                for op in after
            )
        )


@dataclass
class Broadcast:
    """A tensor that the first rank has: a collective call."""

    places: Sequence[Place]
    tensor: Tensor | None  # None on other ranks

    def rows(self, spans: Sequence[Span], device: torch.device) -> Sequence[Tensor]:
        ((start, stop),) = spans
        target = getattr(*self.places[0])
        if self.tensor is None:
            whole = torch.empty(target.shape, dtype=target.dtype, device=device)
        else:
            whole = self.tensor.detach().to(device, target.dtype).contiguous()
        dist.broadcast(whole, src=0)
        return [whole[start:stop] if whole.dim() else whole]
