"""A DataProto in a folder: safetensors and JSON, never pickle.

    columns.safetensors   the tensor columns and the numeric non-tensor columns
    columns.json          format, rows, names of the columns, object columns, meta_info

The folder is written aside, flushed and renamed into place, so that a folder of that name is always whole; while one
replaces another there is none of that name for an instant. Object columns and meta_info must come back from JSON as
they were: None, bool, int, float, str, and lists and string-keyed dicts of them; a tuple would come back as a list and
is refused.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

if TYPE_CHECKING:
    from drivetrain.protocol.dataproto import DataProto

FORMAT = 1
TENSORS, DESCRIPTION = "columns.safetensors", "columns.json"


def save(proto: DataProto, folder: str | os.PathLike[str]) -> None:
    """Write `proto` to `folder`, replacing a DataProto that is there; fetches what is elsewhere.

    Raises TypeError naming the column and row, or meta_info key, that JSON can't give back, and
    FileExistsError when `folder` is something else.
    """
    folder = Path(folder).absolute()
    is_empty = folder.is_dir() and not any(folder.iterdir())
    if folder.exists() and not is_empty and not (folder / DESCRIPTION).is_file():
        raise FileExistsError(f"{folder} is there and is no saved DataProto")
    tensors, objects = dict(proto.batch), {}
    for name, array in proto.non_tensor_batch.items():
        if array.dtype == object:
            objects[name] = array.tolist()
            for row, value in enumerate(objects[name]):
                _check_json(value, f"column '{name}', row {row}")
        else:
            tensors[name] = torch.from_numpy(np.ascontiguousarray(array))
    for key, value in proto.meta_info.items():
        _check_json(value, f"meta_info '{key}'")
    description = {
        "format": FORMAT,
        "rows": proto._rows.value,
        "batch": list(proto.batch),
        "non_tensor_batch": list(proto.non_tensor_batch),
        "objects": objects,
        "meta_info": proto.meta_info,
    }
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.tmp")
    aside.mkdir()
    try:
        save_file(_own_storage(tensors), aside / TENSORS)
        (aside / DESCRIPTION).write_text(json.dumps(description, indent=1), encoding="ascii")
        for name in (TENSORS, DESCRIPTION):
            with (aside / name).open("rb") as file:
                os.fsync(file.fileno())
        old = aside.with_suffix(".old")
        if folder.exists():  # a folder that is not empty can't be renamed over
            os.replace(folder, old)
        os.replace(aside, folder)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def load(folder: str | os.PathLike[str], device: str = "cpu") -> DataProto:
    """Read what `save` wrote, tensor columns onto `device`. ValueError for another format."""
    from drivetrain.protocol.dataproto import DataProto

    description = json.loads((Path(folder) / DESCRIPTION).read_text(encoding="ascii"))
    if description["format"] != FORMAT:
        raise ValueError(f"{folder} has format {description['format']}; this reads {FORMAT}")
    columns: dict[str, Any] = dict(load_file(Path(folder) / TENSORS)) | description["objects"]
    proto = DataProto(meta_info=description["meta_info"])
    proto._rows.value = description["rows"]
    for name in description["batch"]:
        proto.batch[name] = columns[name].to(device)
    for name in description["non_tensor_batch"]:
        column = columns[name]
        proto.non_tensor_batch[name] = column.numpy() if isinstance(column, Tensor) else column
    return proto


def _own_storage(columns: dict[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors of which no two share memory, as safetensors asks for."""
    kept: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in columns.items():
        tensor = tensor.detach().contiguous()
        memory = tensor.untyped_storage().data_ptr()
        kept[name] = tensor.clone() if memory in seen else tensor
        seen.add(memory)
    return kept


def _check_json(value: Any, where: str) -> None:
    """TypeError unless JSON would give `value` back as it is."""
    if type(value) is list:
        for element in value:
            _check_json(element, where)
    elif type(value) is dict and all(type(key) is str for key in value):
        _check_json(list(value.values()), where)
    elif value is not None and type(value) not in (bool, int, float, str):
        raise TypeError(f"{where} cannot be saved: JSON would not give back {value!r} as it is")
