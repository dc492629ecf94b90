"""Loading over several ranks: a model is built without memory, sharded, and then filled with the rows each rank holds.

A rank reads from the folder's safetensors those rows of a tensor that its shard has. Where a family holds several of a
folder's tensors as one, a rank reads the experts that its shard has; of what is not a stack of experts it reads the
tensors whole, converts them and keeps its rows, one parameter after the other. What has no safetensors to read from
(weights drawn from the seed, other file formats, quantised folders) the first rank makes whole on its host, and
broadcasts parameter by parameter.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from drivetrain import DrivetrainError, RunError, UserError
from drivetrain_backend_fsdp.pieces import Broadcast, Converted, Given, Stored
from drivetrain_backend_fsdp.sharding import local

if TYPE_CHECKING:
    from drivetrain_backend_fsdp.pieces import Piece, Place

logger = logging.getLogger(__name__)


# -- models without memory --------------------------------------------------------------------------------------------


def skeleton(kind: Any, path: Path, config: PreTrainedConfig, options: Mapping[str, Any]) -> PreTrainedModel:
    """A model whose parameters are on the meta device; its buffers are real."""
    with _without_memory():
        model = cast(PreTrainedModel, kind.from_config(config, **options))
    dtype = options["dtype"]
    if dtype != torch.float32:  # as from_pretrained does
        strict = [pattern.replace("*", ".*") for pattern in model._keep_in_fp32_modules_strict or ()]
        for name, tensor in (*model.named_parameters(), *_kept_buffers(model)):
            if any(re.search(pattern, name) for pattern in strict):
                tensor.data = tensor.data.float()
    if (path / "generation_config.json").is_file() and model.can_generate():
        model.generation_config = GenerationConfig.from_pretrained(path)
    return model


@contextmanager
def _without_memory() -> Iterator[None]:
    """Have modules keep the parameters they register on the meta device. Buffers stay, for nothing reads them later."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:  # one that is, is tied
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _kept_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers that belong to a folder."""
    kept = set(model.state_dict())
    return ((name, buffer) for name, buffer in model.named_buffers() if name in kept)


def _place(model: nn.Module, name: str) -> Place:
    owner, _, leaf = name.rpartition(".")
    return model.get_submodule(owner), leaf


# -- plans ------------------------------------------------------------------------------------------------------------


def has_slices(path: Path, config: PreTrainedConfig) -> bool:
    """Whether parts of a folder's tensors can be read and be used as they are."""
    return getattr(config, "quantization_config", None) is None and bool(_files(path))


def _files(path: Path) -> list[Path]:
    index = path / "model.safetensors.index.json"
    if (path / "model.safetensors").is_file():
        return [path / "model.safetensors"]
    if not index.is_file():
        return []
    return [path / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]


def plan_slices(model: PreTrainedModel, path: Path, rank: int) -> set[str]:
    """Plan to fill a skeleton from a folder; returns the names that the folder lacks.

    Raises:
        drivetrain.UserError: a tensor has another shape than the model's.
    """
    stored: dict[str, Any] = {}
    for file in _files(path):
        opened = safe_open(file, framework="pt").__enter__()
        stored |= {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
    mapping = get_model_conversion_mapping(model)
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    held = model.state_dict(keep_vars=True)
    direct: dict[str, Any] = {}
    converted: dict[str, Converted] = {}
    unexpected: list[str] = []
    for name in sorted(stored, key=dot_natural_key):
        options: dict[str, Any] = {"base_model_prefix": model.base_model_prefix, "meta_state_dict": held}
        target, pattern = rename_source_key(name, renamings, converters, **options)
        if target not in held and name in held:
            target, pattern = rename_source_key(name, [], [], **options)
        if target not in held:
            unexpected.append(name)
        elif pattern is None:
            direct[target] = stored[name]
        else:
            piece = Converted(model, by_pattern[pattern], target, held[target].shape)
            converted.setdefault(target, piece).sources.append((pattern, name, stored[name]))
    cast(Any, model)._weight_conversions = [entry for entry in mapping if entry.was_used()]

    _untie(model, direct)
    pieces: list[Piece] = []
    filled: set[int] = set()
    held = model.state_dict(keep_vars=True)
    for piece in converted.values():
        piece.names = [name for name in piece.names_made() if name in held]
        piece.places = [_place(model, name) for name in piece.names]
        filled |= {id(held[name]) for name in piece.names}
        pieces.append(piece)
    for name, part in direct.items():
        tensor = held[name]
        if list(part.get_shape()) != list(tensor.shape):
            raise UserError(f"{name} has the shape {part.get_shape()} in {path} and {list(tensor.shape)} in the model",
                            where="model.path", mend="give a folder whose config fits its weights")  # fmt: skip
        if id(tensor) not in filled:
            pieces.append(Stored([_place(model, name)], part))
            filled.add(id(tensor))
    cast(Any, model).unread = pieces
    if unexpected and not rank:
        ignored = [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq", r"(^|\.)position_ids$"]
        if found := [name for name in unexpected if not any(re.search(pattern, name) for pattern in ignored)]:
            logger.warning("%s holds %d tensors that the model has no use for, first %s", path, len(found), found[0])
    may_lack = model._keys_to_ignore_on_load_missing or ()
    return {
        name
        for name, tensor in held.items()
        if id(tensor) not in filled
        and (isinstance(tensor, nn.Parameter) or not any(re.search(pattern, name) for pattern in may_lack))
    }


def plan_given(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> None:
    """Plan to fill these too."""
    cast(Any, model).unread += [Given([_place(model, name)], tensor) for name, tensor in tensors.items()]


def _untie(model: PreTrainedModel, direct: Mapping[str, Any]) -> None:
    """Part tensors that the config ties and the folder has with different contents, as transformers does."""
    first: dict[int, str] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        if name not in direct:
            continue
        other = first.setdefault(id(tensor), name)
        if other != name and not _agreed(lambda a=name, b=other: _equal(direct[a], direct[b])):  # type: ignore[misc]
            module, leaf = _place(model, name)
            setattr(module, leaf, nn.Parameter(torch.empty_like(tensor), requires_grad=tensor.requires_grad))
            cast(Any, model).all_tied_weights_keys.pop(name, None)


def _equal(one: Any, other: Any, rows: int = 4096) -> bool:
    size = one.get_shape()[0]
    return all(torch.equal(one[at : at + rows], other[at : at + rows]) for at in range(0, size, rows))


def plan_broadcast(model: PreTrainedModel, make: Callable[[], PreTrainedModel], rank: int) -> None:
    """Plan to fill a skeleton from a model that the first rank makes whole: a collective call.

    Raises:
        drivetrain.DrivetrainError: on all ranks, what the first one met.
    """
    mine = list(model.named_parameters()) + list(_kept_buffers(model))

    def build() -> dict[str, Tensor]:
        whole = make()
        found = dict(whole.named_parameters()) | dict(_kept_buffers(whole))
        if {name: tensor.shape for name, tensor in found.items()} != {name: t.shape for name, t in mine}:
            raise UserError(f"{type(whole).__name__} has other weights once it is loaded than its config says",
                            where="model.path", mend="export the model as safetensors that are not quantised, or use"
                            " one process")  # fmt: skip
        return found

    found: dict[str, Tensor] = {}
    _agreed(lambda: found.update(build()))
    cast(Any, model).unread = [Broadcast([_place(model, name)], found.get(name)) for name, _ in mine]


def _agreed(ask: Callable[[], Any]) -> Any:
    """What the first rank answers, or raises, on all ranks; the answer is small."""
    answer: list[Any] = [None]
    if not dist.get_rank():
        try:
            answer[0] = ask()
        except DrivetrainError as error:
            answer[0] = error
        except Exception as error:
            answer[0] = RunError(f"rank 0 could not load the model: {error!r}")
    dist.broadcast_object_list(answer, src=0)
    if isinstance(answer[0], DrivetrainError):
        raise answer[0]
    return answer[0]


# -- filling ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def fill(model: nn.Module, device: torch.device, *, on_host: bool = False) -> None:
    """Give a sharded skeleton memory on the device, or on the host, and each shard its contents.

    A collective call, between devices, where the first rank has the contents.

    Raises:
        drivetrain.UserError: what a family's conversion makes of the folder has another shape than the model's.
    """
    tied: dict[int, list[Place]] = {}
    for module in model.modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                tied.setdefault(id(parameter), []).append((module, leaf))
    memory = torch.device("cpu") if on_host else device
    model._apply(lambda tensor: torch.empty_like(tensor, device=memory) if tensor.is_meta else tensor)
    for (first, leaf), *others in tied.values():
        for module, name in others:
            module._parameters[name] = first._parameters[leaf]
    pieces: list[Piece] = cast(Any, model).unread
    del model.unread
    for piece in pieces:
        parts = [local(getattr(module, leaf)) for module, leaf in piece.places]
        spans = [(start, start + (len(part) if part.dim() else 0)) for part, start in parts]
        for (part, _), rows in zip(parts, piece.rows(spans, device), strict=True):
            if part.numel() and part.shape != rows.shape:
                raise UserError(f"the folder's weights make {list(rows.shape)} where the model has {list(part.shape)}",
                                where="model.path", mend="give a folder whose config fits its weights")  # fmt: skip
            if part.numel():
                part.copy_(rows)
