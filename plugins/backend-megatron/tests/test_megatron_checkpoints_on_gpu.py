"""On a GPU: a snapshot is in pinned memory, no later work on the device changes it, and training goes on from it."""

from __future__ import annotations

import threading
from pathlib import Path

import megatron_learning as learning
import megatron_rig as rig
import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("groups_go")]
pytest.importorskip("drivetrain_hardware_cuda")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("distributed", [False, True])
def test_files_are_written_while_training_goes_on(tmp_path: Path, distributed: bool, dtype: str) -> None:
    options = {"hardware": "cuda", "model": {"dtype": dtype}, "use_distributed_optimizer": distributed}
    folder = rig.write_model("tied", tmp_path / "model", hidden_size=64)
    made = learning.backend(folder, **options)
    for number in (1, 2):  # the second copy takes the buffers of the first
        learning.update(made, 0)
        saved, copied = (tmp_path / f"{name}-{number}" for name in ("saved", "copied"))
        saved.mkdir(), copied.mkdir()
        made.save(saved)
        writing = threading.Thread(target=made.snapshot(), args=(copied,))
        writing.start()
        after = [learning.update(made, 0) for _ in range(5)]
        writing.join()
        for name in ("rank-0.safetensors", "rank-0.json"):
            assert (copied / name).read_bytes() == (saved / name).read_bytes()
    copies = made._copies._buffers
    assert all(buffer.is_pinned() for name, buffer in copies.items() if not name.startswith("rng."))
    fresh = learning.backend(folder, **options)
    fresh.load(copied)
    assert learning.update(fresh, 0) == pytest.approx(after[0], rel=1e-3 if dtype == "bfloat16" else 1e-6)
