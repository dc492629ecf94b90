"""Taking a stream of weights into the engine's own model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from drivetrain import WeightStreamError
from drivetrain.weights import Manifest, WeightEntry, WeightStream


@torch.no_grad()
def receive(module: nn.Module, stream: WeightStream) -> None:
    """Copy a whole stream into a module.

    Tensors are named as in the module or, for a model whose files divide its tensors otherwise (the experts of
    Mixtral), as in its files. Tensors are copied as they come; after an error the module is partly new, partly old. A
    stream for a model with such files is kept aside until it is complete.

    Raises:
        WeightStreamError: for a tensor that is missing, unknown, sent twice, a shard, or of the wrong shape.
    """
    own: dict[str, Tensor] = module.state_dict()
    shapes = {name: tensor.to("meta") for name, tensor in own.items()}
    files: dict[str, Tensor] = revert_weight_conversion(cast(PreTrainedModel, module), shapes)
    if files.keys() == own.keys():
        taken = _Taken(own)
        for bucket in stream:
            for entry in _checked(bucket.entries, bucket.kind):
                taken.take(entry, None if entry.alias else entry.tensor)
        taken.complete()
        return

    entries: list[tuple[WeightEntry, Tensor | None]] = []
    for bucket in stream:
        checked = _checked(bucket.entries, bucket.kind)
        entries += [(entry, None if entry.alias else entry.tensor.clone()) for entry in checked]
    names = {entry.name for entry, _ in entries}
    as_files = len(names & files.keys()) > len(names & own.keys())
    target = {name: torch.empty_like(tensor, device="cpu") for name, tensor in files.items()} if as_files else own
    taken = _Taken(target)
    for entry, tensor in entries:
        taken.take(entry, tensor)
    taken.complete()
    if as_files:
        model = cast(PreTrainedModel, module)
        converted = type(model).from_pretrained(None, config=model.config, state_dict=target, dtype=model.dtype)
        for name, tensor in converted.state_dict().items():
            own[name].copy_(tensor)


def _checked(entries: tuple[WeightEntry, ...], kind: str) -> tuple[WeightEntry, ...]:
    if kind != "full":
        raise WeightStreamError(f"rollout 'hf' takes full weights; a bucket of kind {kind!r} was sent")
    for entry in entries:
        if entry.placement.count > 1:
            raise WeightStreamError(f"weight {entry.name!r} was sent as a shard; rollout 'hf' takes whole tensors")
    return entries


class _Taken:
    """Tensors that are being filled, each once."""

    def __init__(self, target: Mapping[str, Tensor]) -> None:
        self._target = target
        self._manifest = Manifest({name: (tuple(tensor.shape), tensor.dtype) for name, tensor in target.items()})
        self._filled: dict[int, str] = {}
        self._aliases: list[WeightEntry] = []

    def take(self, entry: WeightEntry, tensor: Tensor | None) -> None:
        """Check an entry and copy its tensor; an alias waits for the tensor that it names."""
        self._manifest.accept(entry)
        if tensor is None:
            self._aliases.append(entry)
            return
        place = self._target[entry.name]
        tied_to = self._filled.setdefault(place.data_ptr(), entry.name)
        if tied_to == entry.name:
            place.copy_(tensor)
        elif not torch.equal(place, tensor.to(place)):
            raise WeightStreamError(f"weights {tied_to!r} and {entry.name!r} are one tensor here, but differ as sent")

    def complete(self) -> None:
        """Fill aliases, and check that nothing is missing."""
        self._manifest.complete()
        for entry in self._aliases:
            place, meant = self._target[entry.name], self._target.get(cast(str, entry.alias))
            if meant is None or meant.data_ptr() not in self._filled:
                raise WeightStreamError(f"weight {entry.name!r} is an alias of {entry.alias!r}, which was not sent")
            if place.data_ptr() not in self._filled:
                place.copy_(meant)
