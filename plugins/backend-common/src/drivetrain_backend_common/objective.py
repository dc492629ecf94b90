"""The objective of an update: its terms, which rows they need together, and their value on a micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from drivetrain import PluginError, UserError, resolve
from drivetrain.metrics import merge_metrics
from drivetrain.numerics import LossInputs, group_index
from drivetrain.seam.registry import get_registry

if TYPE_CHECKING:
    from drivetrain import DataProto, LossTerm, PolicyLossSpec
    from drivetrain.metrics import Metric
    from drivetrain.numerics import Counts


class Columns(Mapping[str, Tensor]):
    """The columns of some rows of a batch, on the device; a column is fetched and moved when it is first read.

    Labels that are no tensors (``uid``, ``loss_group``) become integers: equal ones where the labels are equal.
    """

    def __init__(self, batch: DataProto, device: torch.device) -> None:
        self._batch = batch
        self._device = device
        self._whole: dict[str, Tensor] = {}
        self._rows: Tensor | None = None

    def of(self, rows: Sequence[int]) -> Columns:
        """The same columns, of these rows."""
        part = Columns(self._batch, self._device)
        part._whole = self._whole
        part._rows = torch.tensor(rows, dtype=torch.long, device=self._device)
        return part

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._whole:
            self._whole[name] = self._fetch(name).to(self._device)
        whole = self._whole[name]
        return whole if self._rows is None else whole.index_select(0, self._rows)

    def _fetch(self, name: str) -> Tensor:
        if name in self._batch.batch:
            return cast(Tensor, self._batch.batch[name])
        array = self._batch.non_tensor_batch[name]
        return group_index(array.tolist()) if array.dtype == object else torch.as_tensor(array)

    def __iter__(self) -> Iterator[str]:
        return iter(self._batch.keys())

    def __len__(self) -> int:
        return len(self._batch.keys())


@dataclass(frozen=True)
class Objective:
    """The sum over terms of ``weight * term``; terms of weight 0 are left out."""

    terms: tuple[tuple[LossTerm, Callable[..., Any], PolicyLossSpec], ...]
    outputs: tuple[str, ...]  # of the model, that are computed for the terms

    @classmethod
    def of(cls, terms: Sequence[LossTerm], offered: Sequence[str]) -> Objective:
        """Look the terms up; ``offered`` are the model's outputs, of which the first is always computed.

        Raises:
            drivetrain.PluginError: for an unknown name, or a term that needs what this backend does not compute.
        """
        registry = get_registry()
        found = tuple(
            (
                term,
                resolve("policy_losses", term.name),
                cast("PolicyLossSpec", registry.select("policy_losses", term.name).spec),
            )
            for term in terms
            if term.weight != 0
        )
        for term, _, spec in found:
            if unknown := set(spec.needs) - set(offered):
                raise PluginError(f"the term {term.name!r} needs {sorted(unknown)}, which the backend does not"
                                  f" compute for a model that gives {' and '.join(offered)}")  # fmt: skip
        needed = {name for _, _, spec in found for name in spec.needs} | {offered[0]}
        return cls(found, tuple(name for name in offered if name in needed))

    def joins(self, batch: DataProto) -> list[list[Any]]:
        """Labels of rows; rows with an equal label of one kind are not separated."""
        names = ["loss_group"] if "loss_group" in batch else []
        if any(spec.scope == "group" for _, _, spec in self.terms):
            names.append("uid")
        return [batch[name].tolist() for name in names]

    def check(self, micro_batches: int, world_size: int) -> None:
        """Refuse what cannot be summed over parts.

        Raises:
            drivetrain.UserError: for a term over the whole mini-batch that would see a part of it.
        """
        for term, _, spec in self.terms:
            if spec.scope == "batch" and (micro_batches > 1 or world_size > 1):
                raise UserError(
                    f"the term {term.name!r} needs the whole mini-batch at once, but it is cut into {micro_batches}"
                    f" micro-batches on each of {world_size} ranks",
                    where="actor.backend.micro_batch_tokens",
                    mend="raise micro_batch_tokens, shrink actor.mini_batch_prompts, or use one rank",
                )  # fmt: skip

    def __call__(
        self, outputs: LossInputs, batch: Mapping[str, Tensor], counts: Counts
    ) -> tuple[Tensor, dict[str, Metric]]:
        """The objective's share of some rows, and the metrics of its terms."""
        results = [(term, function(outputs, batch, counts, **term.args)) for term, function, _ in self.terms]
        like = outputs.require(cast(Any, self.outputs[0]))
        loss = sum((term.weight * result.loss for term, result in results), like.new_zeros(()))
        return loss, merge_metrics(result.metrics for _, result in results)
