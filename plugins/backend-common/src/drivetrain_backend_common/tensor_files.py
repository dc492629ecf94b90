"""Tensors in safetensors files of bounded size, so that a large state does not have to fit into host memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from drivetrain import CheckpointError
from drivetrain.weights import WeightEntry

FILE_BYTES = 4 * 2**30


def write(tensors: Iterable[tuple[str, Tensor]], folder: Path, stem: str) -> dict[str, str]:
    """Write tensors to ``stem.safetensors``, ``stem-1.safetensors`` and so on, each of at most ``FILE_BYTES``.

    A larger tensor has a file to itself. Of tensors on a device, those of one file and one more are on the host at a
    time.

    Args:
        tensors: with their names; drawn one by one. One that is on the host is not copied: it has to stay as it is.

    Returns:
        for each tensor the name of its file.
    """
    where: dict[str, str] = {}
    pending: dict[str, Tensor] = {}
    size = files = 0

    def flush() -> None:
        nonlocal size, files
        name = f"{stem}-{files}.safetensors" if files else f"{stem}.safetensors"
        save_file(pending, folder / name, metadata={"format": "pt"})
        where.update(dict.fromkeys(pending, name))
        pending.clear()
        size, files = 0, files + 1

    for name, tensor in tensors:
        if pending and size + tensor.nbytes > FILE_BYTES:
            flush()
        pending[name] = tensor.detach().cpu().contiguous()
        size += tensor.nbytes
    flush()
    return where


def write_rank(
    tensors: Mapping[str, Tensor], describe: Callable[[Mapping[str, str]], Any], rank: int, folder: Path
) -> None:
    """Write a rank's part of a checkpoint: its tensors, and beside them ``rank-N.json``.

    Args:
        describe: given the file of each tensor, returns what goes into the JSON file.

    Raises:
        drivetrain.CheckpointError: something cannot be written.
    """
    try:
        files = write(tensors.items(), folder, f"rank-{rank}")
        (folder / f"rank-{rank}.json").write_text(json.dumps(describe(files)))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"rank {rank} cannot write its part of the checkpoint: {error}", where=str(folder),
                              mend="see to the disk") from error  # fmt: skip


@contextmanager
def drained(entries: Iterable[WeightEntry]) -> Iterator[Iterator[WeightEntry]]:
    """Weights to draw from. What is left at the end is drawn then, after an error too: ranks gather them together, and
    none may wait for this one."""
    going = iter(entries)
    try:
        yield going
    finally:
        for _ in going:
            pass


def write_model(entries: Iterable[WeightEntry], folder: Path) -> None:
    """Write weights on loan as the safetensors of a Hugging Face folder, with an index where there are several."""
    sizes: dict[str, int] = {}

    def copies() -> Iterator[tuple[str, Tensor]]:
        for entry in entries:
            if not entry.alias:
                sizes[entry.name] = entry.nbytes
                yield entry.name, torch.empty(entry.shape, dtype=entry.dtype).copy_(entry.tensor.detach())

    where = write(copies(), folder, "model")
    files = list(dict.fromkeys(where.values()))
    if len(files) == 1:
        return
    names = {file: f"model-{number:05}-of-{len(files):05}.safetensors" for number, file in enumerate(files, 1)}
    for file, name in names.items():
        (folder / file).rename(folder / name)
    index = {"metadata": {"total_size": sum(sizes.values())},
             "weight_map": {tensor: names[file] for tensor, file in where.items()}}  # fmt: skip
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True))
