"""Weights into and out of the parameters of all ranks, under the names of a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from safetensors import safe_open
from torch import Tensor

from drivetrain import UserError
from drivetrain.weights import WeightEntry
from drivetrain_backend_megatron.families import FUSED, Parameter, Slice


def held(pieces: Sequence[GPTModel]) -> dict[str, Tensor]:
    """This rank's parameters, by their names in the whole model."""
    found: dict[str, Tensor] = {}
    for piece in pieces:
        for name, parameter in piece.named_parameters():
            words = name.split(".")
            if name.startswith("decoder.layers."):
                words[2] = str(piece.decoder.layers[int(words[2])].layer_number - 1)
                words[3:] = FUSED.get(".".join(words[3:]), ".".join(words[3:])).split(".")
            if "local_experts" in words:
                place = words.index("local_experts") + 1
                local = len(piece.get_submodule(".".join(name.split(".")[:place])))
                words[place] = str(int(words[place]) + parallel_state.get_expert_model_parallel_rank() * local)
            found[".".join(words)] = parameter
    return found


def share(parameter: Parameter) -> tuple[int, int]:
    """Which share of how many this rank has of a parameter."""
    if parameter.split == "none":
        return 0, 1
    if parameter.expert:
        return (parallel_state.get_expert_tensor_parallel_rank(),
                parallel_state.get_expert_tensor_parallel_world_size())  # fmt: skip
    return (parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size())


def mark_shares(pieces: Sequence[GPTModel], table: Mapping[str, Parameter]) -> None:
    """Tell megatron-core which parameters ranks have shares of; it does so by itself only where it draws weights.

    The norm of gradients counts all others once.
    """
    for name, parameter in held(pieces).items():
        parameter.tensor_model_parallel = table[name].split != "none" or table[name].expert  # type: ignore[attr-defined]


# -- in ---------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def load(
    pieces: Sequence[GPTModel], table: Mapping[str, Parameter], folder: Path, *, where: str = "model.path",
    drawn: Mapping[str, Tensor] | None = None,
) -> None:  # fmt: skip
    """Fill this rank's parameters from the safetensors of a folder, of which only its slices are read.

    Rows that pad the vocabulary become zero.

    Args:
        where: the key of the folder, for messages.
        drawn: what takes the place of tensors that the folder lacks, by their names.

    Raises:
        drivetrain.UserError: a tensor is missing, has another shape than the config says, or differs from one that it
            is tied to.
    """
    tied = {parameter.tied for parameter in table.values()}
    with _Folder(folder, where, drawn or {}) as stored:
        for name, target in held(pieces).items():
            parameter = table[name]
            filled = 0
            for part in parameter.slices(*share(parameter)):
                rows = stored.read(part)
                target[part.at : part.at + part.rows].copy_(rows)
                filled += part.rows
            target[filled:].zero_()
            if name in tied and stored.differs("lm_head.weight", parameter, target[:filled]):
                mend = "set tie_word_embeddings to false in its config.json"
                raise UserError("lm_head.weight differs from the embedding, to which the config ties it",
                                where=where, mend=mend)  # fmt: skip


class _Folder:
    """The tensors of a folder's safetensors, read slice by slice."""

    def __init__(self, folder: Path, where: str, drawn: Mapping[str, Tensor]) -> None:
        self.folder, self._where, self._drawn = folder, where, drawn
        self._open: dict[Path, Any] = {}
        index = folder / "model.safetensors.index.json"
        if (whole := folder / "model.safetensors").is_file():
            self._file_of = dict.fromkeys(self._opened(whole).keys(), whole)
        elif index.is_file():
            weight_map = json.loads(index.read_text())["weight_map"]
            self._file_of = {name: folder / file for name, file in weight_map.items()}
        else:
            raise UserError(f"{folder} has no weights as safetensors", where=self._where,
                            mend="save the model with transformers, whose folders have model.safetensors")  # fmt: skip

    def __enter__(self) -> _Folder:
        return self

    def __exit__(self, *error: Any) -> None:
        for file in self._open.values():
            file.__exit__(*error)

    def _opened(self, file: Path) -> Any:
        if file not in self._open:
            self._open[file] = safe_open(file, framework="pt").__enter__()
        return self._open[file]

    def read(self, part: Slice) -> Tensor:
        """A slice, on the host."""
        span = slice(part.start, part.stop)
        if part.name not in self._file_of:
            if part.name in self._drawn:
                return self._drawn[part.name][span]
            raise UserError(f"{self.folder} has no tensor {part.name}", where=self._where,
                            mend="give a folder whose config fits its weights")  # fmt: skip
        stored = self._opened(self._file_of[part.name]).get_slice(part.name)
        if tuple(stored.get_shape()) != part.shape:
            raise UserError(f"{part.name} has the shape {stored.get_shape()} in {self.folder}; its config says"
                            f" {list(part.shape)}", where=self._where,
                            mend="give a folder whose config fits its weights")  # fmt: skip
        return stored[span] if part.dim == 0 else stored[:, span]  # type: ignore[no-any-return]

    def differs(self, name: str, parameter: Parameter, own: Tensor) -> bool:
        """Whether a tensor that need not be there is, with other contents than a parameter."""
        if name not in self._file_of:
            return False
        (part,) = parameter.slices(*share(parameter))
        stored = self._opened(self._file_of[name]).get_slice(name)
        return not stored[part.start : part.stop].to(own).equal(own)


# -- out --------------------------------------------------------------------------------------------------------------


class Gatherer:
    """Puts whole tensors together from the parameters of the ranks that share a copy of the model."""

    def __init__(self, pieces: Sequence[GPTModel], table: Mapping[str, Parameter]) -> None:
        """Learn which rank holds what: a collective call."""
        self.table = table
        self.mine = held(pieces)
        self.dense = parallel_state.get_model_parallel_group()
        self.experts = parallel_state.get_expert_tensor_model_pipeline_parallel_group()
        self._holders: dict[str, dict[int, tuple[int, tuple[int, ...], torch.dtype]]] = {}
        for expert, group in ((False, self.dense), (True, self.experts)):
            self._exchange(expert, group)

    def _exchange(self, expert: bool, group: Any) -> None:
        own = {
            name: (share(self.table[name])[0], dist.get_rank(), tuple(tensor.shape), tensor.dtype)
            for name, tensor in self.mine.items()
            if self.table[name].expert == expert
        }
        everyone: list[Any] = [None] * group.size()
        dist.all_gather_object(everyone, own, group=group)
        for other in everyone:
            for name, (index, *found) in other.items():
                self._holders.setdefault(name, {}).setdefault(index, tuple(found))

    @torch.no_grad()
    def entries(self) -> Iterator[WeightEntry]:
        """The weights, tensor by tensor: a collective call in which all ranks draw the same.

        At one time there is memory for the tensors of one parameter and one share of it.
        """
        for name, parameter in self.table.items():
            if parameter.tied:
                ((source, shape),) = parameter.tensors
                dtype = next(iter(self._holders[parameter.tied].values()))[2]
                yield WeightEntry.whole("lm_head.weight", torch.empty(shape, dtype=dtype, device="meta"), source)
                continue
            yield from (WeightEntry.whole(source, tensor) for source, tensor in self._whole(name, parameter).items())

    def _whole(self, name: str, parameter: Parameter) -> dict[str, Tensor]:
        holders = self._holders[name]
        group = self.experts if parameter.expert else self.dense
        whole: dict[str, Tensor] = {}
        for index in sorted(holders):
            source, shape, dtype = holders[index]
            part = self.mine[name].detach() if source == dist.get_rank() else torch.empty(
                shape, dtype=dtype, device=self._device)  # fmt: skip
            if group.size() > 1:
                dist.broadcast(part, src=source, group=group)
            for piece in parameter.slices(index, len(holders)):
                rows = part[piece.at : piece.at + piece.rows]
                if tuple(rows.shape) == piece.shape:  # nothing to put together
                    whole[piece.name] = rows
                    continue
                if piece.name not in whole:
                    whole[piece.name] = part.new_empty(piece.shape)
                whole[piece.name].narrow(piece.dim, piece.start, piece.stop - piece.start).copy_(rows)
        return whole

    @property
    def _device(self) -> torch.device:
        return next(iter(self.mine.values())).device
