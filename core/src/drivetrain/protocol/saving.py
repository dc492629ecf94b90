"""A DataProto in a folder: tensors and numeric arrays in safetensors, all else in JSON, never pickle."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file

from drivetrain.protocol.batch import same

if TYPE_CHECKING:
    from drivetrain.protocol.dataproto import DataProto

FORMAT = 1
TENSORS, DESCRIPTION = "columns.safetensors", "columns.json"


def save(proto: DataProto, folder: str | os.PathLike[str]) -> None:
    """Write a batch to `folder`, whole or not at all, replacing a DataProto there; fetches what is elsewhere.

    TypeError names what JSON would not give back as it is, a tuple say; FileExistsError if `folder` is something else.
    """
    folder = Path(folder).absolute()
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir()) and not (folder / DESCRIPTION).is_file()):
        raise FileExistsError(f"{folder} is there and is no saved DataProto")
    arrays = proto.non_tensor_batch
    objects = {name: array.tolist() for name, array in arrays.items() if array.dtype == object}
    values = [(f"meta_info '{key}'", value) for key, value in proto.meta_info.items()]
    values += [(f"column '{name}', row {row}", value) for name in objects for row, value in enumerate(objects[name])]
    for where, value in values:
        if not same(json.loads(json.dumps(value, default=repr, skipkeys=True)), value):
            raise TypeError(f"{where} cannot be saved: JSON would not give back {value!r} as it is")
    numeric = {name: torch.from_numpy(array.copy()) for name, array in arrays.items() if name not in objects}
    tensors = {name: tensor.detach().contiguous().clone() for name, tensor in {**proto.batch, **numeric}.items()}
    description = {"format": FORMAT, "batch": list(proto.batch), "non_tensor_batch": list(arrays)}
    description |= {"objects": objects, "meta_info": proto.meta_info}
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as aside:
        new = Path(aside) / "new"
        new.mkdir()
        save_file(tensors, new / TENSORS)
        (new / DESCRIPTION).write_text(json.dumps(description, indent=1), encoding="ascii")
        if folder.exists():  # a folder that is not empty can't be renamed over
            os.replace(folder, Path(aside) / "old")
        os.replace(new, folder)


def load(cls: type[DataProto], folder: str | os.PathLike[str], device: str = "cpu") -> DataProto:
    """Read what `save` wrote, tensors onto `device`. ValueError for another format."""
    description = json.loads((Path(folder) / DESCRIPTION).read_text(encoding="ascii"))
    if description["format"] != FORMAT:
        raise ValueError(f"{folder} has format {description['format']}; this reads {FORMAT}")
    columns, objects = load_file(Path(folder) / TENSORS), description["objects"]
    tensors = {name: columns[name].to(device) for name in description["batch"]}
    names = description["non_tensor_batch"]
    arrays = {name: objects[name] if name in objects else columns[name].numpy() for name in names}
    return cls(tensors, arrays, description["meta_info"])
