"""Checkpoints: parts of the state as safetensors, and JSON files that say what they are parts of.

A folder holds, for each rank, ``rank-0.json``, ``rank-0.safetensors`` and, where its part is large,
``rank-0-1.safetensors`` and so on; of what several ranks have alike one has written. Whatever sizes the ranks had,
others with any sizes read it: parameters, and what an optimizer holds of them, are slices of the tensors of a Hugging
Face folder, and a rank reads those that it needs. Nothing is pickled.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from safetensors import SafetensorError, safe_open
from torch import Tensor

from drivetrain import CheckpointError, RankLayout
from drivetrain_backend_common import copies, tensor_files
from drivetrain_backend_megatron.families import Parameter
from drivetrain_backend_megatron.optimizer import Optimizer
from drivetrain_backend_megatron.weights import share

WEIGHT, COPY = "weight", "float32"  # other parts of a parameter are moments
Table = Mapping[str, Parameter]


def collect(
    model: Mapping[str, Tensor], table: Table, optimizer: Optimizer | None, rng: Mapping[str, Tensor],
    *, rank: int, layout: RankLayout, copy: copies.Copy,
) -> Callable[[Path], None]:  # fmt: skip
    """This rank's part of the state; returns what writes it to a folder, which exists.

    Args:
        model: this rank's parameters.
        table: all parameters.

    Raises:
        drivetrain.NonFiniteError: a weight or a moment is NaN or infinite.
    """
    tensors = {f"rng.{name}": copy(f"rng.{name}", tensor) for name, tensor in rng.items()}  # they go to the first file
    found: dict[str, Tensor] = {}
    parameters: dict[str, Any] = {}
    for name, part, tensor, start in _parts(model, optimizer):
        key = f"{part}.{name}"
        found[key] = copies.finite(tensor)
        if table[name].tied or not _writes(table[name], shared=start is None):
            continue
        tensors[key] = copy(key, tensor)
        about = parameters.setdefault(name, {"of": table[name].tensors, "share": share(table[name]),
                                             "shape": list(model[name].shape), "parts": {}})  # fmt: skip
        about["parts"][part] = [start or 0, (start or 0) + tensor.numel(), str(tensor.dtype)]
    copies.check_finite(found)
    whole = {"layout": asdict(layout), "world_size": torch.distributed.get_world_size(),
             "steps": optimizer.steps if optimizer is not None else 0, "parameters": parameters}  # fmt: skip

    def describe(files: Mapping[str, str]) -> dict[str, Any]:
        for name, about in parameters.items():
            about["files"] = {part: files[f"{part}.{name}"] for part in about["parts"]}
        return whole

    return partial(tensor_files.write_rank, tensors, describe, rank)


def _parts(model: Mapping[str, Tensor], optimizer: Optimizer | None) -> Iterator[tuple[str, str, Tensor, int | None]]:
    """Name of a parameter, which part, what this rank has of it, and from where if data parallel ranks have others."""
    yield from ((name, WEIGHT, tensor, None) for name, tensor in model.items())
    if optimizer is None:
        return
    names = {id(tensor): name for name, tensor in model.items()}
    for (parameter, first), updated, moments in optimizer.held():
        start = first if optimizer.distributed else None
        if _is_copy(parameter, updated):
            yield names[id(parameter)], COPY, updated, start
        for key, value in moments.items():
            if isinstance(value, Tensor) and value.shape == updated.shape:
                yield names[id(parameter)], key, value, start


def _is_copy(parameter: Tensor, updated: Tensor) -> bool:
    return parameter.untyped_storage().data_ptr() != updated.untyped_storage().data_ptr()


def _writes(parameter: Parameter, *, shared: bool) -> bool:
    """Whether this rank is the first of those that have the same: data parallel ranks, if ``shared``, and others."""
    if parameter.expert:
        return not shared or parallel_state.get_expert_data_parallel_rank() == 0
    copied = parameter.split == "none" and parallel_state.get_tensor_model_parallel_rank() > 0
    return not copied and (not shared or parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0)


@torch.no_grad()
def load(
    folder: Path, model: Mapping[str, Tensor], table: Table, optimizer: Optimizer | None,
    set_rng: Callable[[dict[str, Tensor]], None], *, rank: int, layout: RankLayout,
) -> None:  # fmt: skip
    """Read this rank's part into its parameters and its optimizer.

    The random state is put back if the ranks have the sizes of those that wrote.

    Raises:
        drivetrain.CheckpointError: files or tensors are missing, damaged, or of another model or type.
    """
    try:
        stored = _Stored(folder, table)
        for name, tensor in model.items():
            stored.check(name, None if optimizer is None else tensor.dtype)
            stored.read(name, WEIGHT, tensor.shape, tensor.view(-1))
        if optimizer is not None:
            names = {id(tensor): name for name, tensor in model.items()}
            for (parameter, start), updated, moments in optimizer.held():
                name = names[id(parameter)]
                if _is_copy(parameter, updated):
                    stored.read(name, COPY, parameter.shape, updated.view(-1), start)
                moments.clear()
                for key, dtype in stored.moments(name).items():
                    moments[key] = torch.empty_like(updated, dtype=dtype)
                    stored.read(name, key, parameter.shape, moments[key].view(-1), start)
            optimizer.steps = stored.steps
        if stored.layouts.get(rank) == asdict(layout):
            set_rng(stored.rng(rank))
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"the state of backend megatron cannot be read: {error}", where=str(folder),
                              mend="resume from another checkpoint") from error  # fmt: skip


class _Stored:
    """The files of all ranks, as parameters of the whole model."""

    def __init__(self, folder: Path, table: Table) -> None:
        self._folder, self._table = folder, table
        self._files: dict[Path, Any] = {}
        self._about: dict[str, dict[str, Any]] = {}
        self._shapes: dict[tuple[str, int], list[int]] = {}  # of the shares of parameters
        self._parts: dict[tuple[str, str, int], list[tuple[int, int, Path]]] = {}  # of these shares
        self.layouts: dict[int, dict[str, int]] = {}
        self.steps = 0
        written = sorted(folder.glob("rank-*.json"))
        if not written:
            raise CheckpointError(f"{folder} holds no state of backend megatron", mend="resume from another checkpoint")
        for path in written:
            about = json.loads(path.read_text())
            files = {path.with_suffix(".safetensors")}
            files.update(folder / file for entry in about["parameters"].values() for file in entry["files"].values())
            if len(written) != about["world_size"] or not all(file.is_file() for file in files):
                raise self._incomplete(f"{about['world_size']} ranks wrote it, and files of some are missing")
            self.layouts[int(path.stem.removeprefix("rank-"))] = about["layout"]
            self.steps = max(self.steps, about["steps"])  # a rank with no share counts none
            for name, entry in about["parameters"].items():
                index, entry["count"] = entry["share"]
                self._about.setdefault(name, {**entry, "parts": {}})["parts"] |= entry["parts"]
                self._shapes[name, index] = entry["shape"]
                for part, (start, stop, _) in entry["parts"].items():
                    file = folder / entry["files"][part]
                    self._parts.setdefault((name, part, index), []).append((start, stop, file))

    def _incomplete(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self._folder} is not complete: {why}", mend="resume from another checkpoint")

    def check(self, name: str, dtype: torch.dtype | None) -> None:
        """Raise CheckpointError unless this is a parameter of the model, and its type that of the one which learns."""
        name = self._table[name].tied or name
        theirs = {key: tuple(shape) for key, shape in self._about.get(name, {"of": ()})["of"]}
        if theirs != dict(self._table[name].tensors):
            raise CheckpointError(f"the checkpoint holds {theirs or 'nothing'} for {name!r}; the model has"
                                  f" {dict(self._table[name].tensors)}", where=str(self._folder),
                                  mend="resume with the model that was saved")  # fmt: skip
        *_, stored = self._about[name]["parts"][WEIGHT]
        if dtype is not None and stored != str(dtype):
            raise CheckpointError(f"the checkpoint holds {name!r} in {stored}; the model has it in {dtype}",
                                  where=str(self._folder), mend="resume with the model.dtype that was saved",
                                  )  # fmt: skip

    def moments(self, name: str) -> dict[str, torch.dtype]:
        """The moments of a parameter, and their types."""
        parts = self._about[self._table[name].tied or name]["parts"]
        return {part: getattr(torch, dtype.removeprefix("torch.")) for part, (_, _, dtype) in parts.items()
                if part not in (WEIGHT, COPY)}  # fmt: skip

    def read(self, name: str, part: str, shape: torch.Size, into: Tensor, start: int = 0) -> None:
        """Fill numbers of this rank's share of a parameter, which has this shape, from ``start`` on."""
        name = self._table[name].tied or name
        parameter, theirs = self._table[name], self._about[name]["count"]
        index, count = share(parameter)
        if count == theirs:
            self._copy(name, part, index, into, start)
            return
        whole = torch.zeros(shape, dtype=into.dtype)  # on the host, as the files are
        for other in range(theirs):
            both = [(a, b, max(a.start, b.start), min(a.stop, b.stop)) for a in parameter.slices(index, count)
                    for b in parameter.slices(other, theirs) if a.name == b.name]  # fmt: skip
            if not any(low < high for *_, low, high in both):
                continue
            rows = torch.empty(self._shapes[name, other], dtype=into.dtype)
            self._copy(name, part, other, rows.view(-1))
            for a, b, low, high in both:
                if low < high:
                    mine, found = whole[a.at : a.at + a.rows], rows[b.at : b.at + b.rows]
                    mine.narrow(a.dim, low - a.start, high - low).copy_(
                        found.narrow(b.dim, low - b.start, high - low))  # fmt: skip
        into.copy_(whole.view(-1)[start : start + len(into)])

    def _copy(self, name: str, part: str, index: int, into: Tensor, start: int = 0) -> None:
        """Fill numbers of a share as it was written, from ``start`` on."""
        stop, filled = start + len(into), 0
        for first, last, file in self._parts.get((name, part, index), ()):
            low, high = max(start, first), min(stop, last)
            if low < high:
                numbers = self._opened(file).get_tensor(f"{part}.{name}").view(-1)
                into[low - start : high - start].copy_(numbers[low - first : high - first])
                filled += high - low
        if filled != len(into):
            raise self._incomplete(f"it has {filled} of {len(into)} numbers of {part} of {name!r}")

    def _opened(self, file: Path) -> Any:
        if file not in self._files:
            self._files[file] = safe_open(file, framework="pt").__enter__()
        return self._files[file]

    def rng(self, rank: int) -> dict[str, Tensor]:
        """The random state of a rank."""
        file = self._opened(self._folder / f"rank-{rank}.safetensors")
        return {name[4:]: file.get_tensor(name) for name in file.keys() if name.startswith("rng.")}
