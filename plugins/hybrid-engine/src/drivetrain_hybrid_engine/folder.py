"""The transport ``folder``: between nodes that share files, and no fast network."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from drivetrain import Meeting, RunError, UserError
from drivetrain.weights import Bucket
from drivetrain_hybrid_engine.announced import Announced

VARIABLE = "WEIGHT_TRANSPORT_FOLDER"
"""Environment variable of the sender: an existing folder that all ends reach by that path."""

PATIENCE_S = 60.0
"""How long a file that was announced may take to appear: as long as NFS may go on with what it knew of a folder."""


class Folder(Announced):
    """Each bucket is a safetensors file, which receivers map into memory; none is left at the end of a stream."""

    name = "folder"

    def __init__(self, meeting: Meeting, parent: Path | None = None) -> None:
        """Raises UserError if there is no such folder.

        Args:
            parent: where the sender makes a folder of its own; None: by :data:`VARIABLE`, or for temporary files.
        """
        super().__init__(meeting)
        named = os.environ.get(VARIABLE)
        self._parent = parent or Path(named or tempfile.gettempdir()).absolute()
        if meeting.rank == 0 and not self._parent.is_dir():
            raise UserError(f"{self._parent} is not a folder", where=VARIABLE if named else self._where,
                            mend=f"set {VARIABLE} to a folder that all nodes share")  # fmt: skip
        self._own: Path | None = None
        self._files: dict[int, Path] = {}
        self._written = 0

    def put(self, place: int, bucket: Bucket) -> str:
        if self._own is None:
            self._own = Path(tempfile.mkdtemp(prefix="weights-", dir=self._parent))
        path = self._own / f"{self._written}.safetensors"
        self._written += 1
        tensors = {entry.name: _on_host(entry.tensor) for entry in bucket.entries if not entry.alias}
        aside = path.with_suffix(".partial")
        save_file(tensors, aside, metadata={"version": str(bucket.version), "kind": bucket.kind})
        aside.replace(path)
        self._files[place] = path
        return str(path)

    def take(self, place: int, header: dict[str, Any]) -> list[Tensor]:
        path = Path(header["at"])
        deadline = time.monotonic() + PATIENCE_S
        while not path.exists():
            if time.monotonic() > deadline:
                raise RunError(f"rank 0 wrote {path}, which is not there for rank {self._meeting.rank}",
                               where=self._where, mend=f"set {VARIABLE} of rank 0 to a folder that all nodes share",
                               )  # fmt: skip
            time.sleep(0.05)
        with safe_open(path, framework="pt") as file:
            return [torch.empty(0) if one["alias"] else file.get_tensor(one["name"]) for one in header["entries"]]

    def taken(self, place: int) -> None:
        self._files.pop(place).unlink()

    def end(self) -> None:
        if self._own is not None:
            shutil.rmtree(self._own)
        self._own, self._files = None, {}


def _on_host(tensor: Tensor) -> Tensor:
    """A copy with memory of its own, for a file has no two tensors in one place."""
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
