"""Weights under the names that Hugging Face folders use, and such folders.

In memory transformers may hold weights in another form than its folders do (the experts of a mixture as one tensor).
What leaves the backend has the names and shapes of a folder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, revert_weight_conversion

from drivetrain import UserError
from drivetrain.weights import WeightEntry
from drivetrain_backend_common import tensor_files
from drivetrain_backend_common.folders import complete
from drivetrain_backend_fsdp import lora, sharding
from drivetrain_backend_fsdp.sharding import whole

if TYPE_CHECKING:
    from drivetrain import ModelConfig


def entries(model: PreTrainedModel, *, sharded: bool = False) -> Iterator[WeightEntry]:
    """The weights, gathered one by one; a tied tensor comes once, then as an alias of the first.

    A collective call where the model is sharded. Where a family joins several of its weights into one of a folder,
    all are gathered at once.

    Args:
        sharded: leave shards what they are, but for tensors that have another form in a folder than in memory.
    """
    if _joins_weights(model):
        everything = {name: give(whole) for name, _, give in _held(model)}
        yield from (
            WeightEntry.whole(name, tensor) for name, tensor in revert_weight_conversion(model, everything).items()
        )
        return
    first: dict[int, str] = {}
    same = _same_in_folders(model)
    for name, tensor, give in _held(model):
        disk_name = same.get(name)
        if id(tensor) in first:
            yield WeightEntry.whole(disk_name or name, tensor, first[id(tensor)])
        elif disk_name is None:  # a weight that is several in a folder
            for disk_name, part in revert_weight_conversion(model, {name: give(whole)}).items():
                first[id(tensor)] = disk_name
                yield WeightEntry.whole(disk_name, part)
        else:
            first[id(tensor)] = disk_name
            if sharded and (placement := sharding.placement(tensor)):
                yield WeightEntry.share(disk_name, give(lambda t: sharding.local(t)[0]), tensor.shape, placement)
            else:
                yield WeightEntry.whole(disk_name, give(whole))


_SAME: WeakKeyDictionary[PreTrainedModel, dict[str, str]] = WeakKeyDictionary()


def _same_in_folders(model: PreTrainedModel) -> dict[str, str]:
    """Names in a folder of the tensors that have the same form there. Asked of transformers once for each model: it
    walks through all modules to answer, for one tensor as for all."""
    if model not in _SAME:
        probes = {name: torch.empty(tensor.shape, device="meta") for name, tensor, _ in _held(model)}
        names = {id(probe): name for name, probe in probes.items()}
        reverted = revert_weight_conversion(model, dict(probes)).items()
        _SAME[model] = {names[id(found)]: disk for disk, found in reverted if id(found) in names}
    return _SAME[model]


def _held(model: PreTrainedModel) -> Iterator[tuple[str, Tensor, Callable[[Callable[[Tensor], Tensor]], Tensor]]]:
    """Parameters under all their names, and the buffers that belong to a folder, each with what gives all or some of
    its rows."""
    kept = set(model.state_dict())
    held = (*model.named_parameters(remove_duplicate=False), *model.named_buffers())
    yield from lora.without_adapter(model, ((name, tensor) for name, tensor in held if name in kept))


def _joins_weights(model: PreTrainedModel) -> bool:
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:
        conversions = get_model_conversion_mapping(model, add_legacy=False)
    return any(
        isinstance(conversion, WeightConverter) and len(conversion.reverse_transform().source_patterns) > 1
        for conversion in conversions
    )


def export(model: PreTrainedModel, config: ModelConfig, folder: Path, *, rank: int) -> None:
    """Write a Hugging Face folder; it appears whole or not at all. A collective call where the model is sharded."""
    with tensor_files.drained(entries(model)) as going:
        if rank == 0:
            with complete(folder) as aside:
                model.save_pretrained(aside, state_dict={})  # all but the weights
                tensor_files.write_model(going, aside)
                _write_tokenizer(config, aside)


def _write_tokenizer(config: ModelConfig, folder: Path) -> None:
    try:
        AutoTokenizer.from_pretrained(
            config.tokenizer_path, trust_remote_code=config.trust_remote_code
        ).save_pretrained(folder)
    except (OSError, ValueError) as error:
        raise UserError(f"the tokenizer does not load: {error}", where="model.tokenizer",
                        mend="give the folder of a tokenizer") from error  # fmt: skip
