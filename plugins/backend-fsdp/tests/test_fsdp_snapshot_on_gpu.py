"""On a device: what a snapshot holds is in pinned memory, and no later work on the device changes it."""

from __future__ import annotations

import threading
from pathlib import Path

import fsdp_ranks
import fsdp_rig as rig
import pytest

pytestmark = pytest.mark.gpu
pytest.importorskip("drivetrain_hardware_cuda")


@pytest.mark.parametrize("fused", [True, False])  # counters of steps on the device, and on the host
def test_files_are_written_while_training_goes_on(qwen2: Path, tmp_path: Path, fused: bool) -> None:
    made = rig.backend(qwen2, hardware="cuda", optimizer={"fused": fused})
    for number in (1, 2):  # the second copy takes the buffers of the first
        fsdp_ranks.update(made, slice(None))
        saved, copied = (tmp_path / f"{name}-{number}" for name in ("saved", "copied"))
        saved.mkdir(), copied.mkdir()
        made.save(saved)
        writing = threading.Thread(target=made.snapshot(), args=(copied,))
        writing.start()
        after = [fsdp_ranks.update(made, slice(None)) for _ in range(5)]
        writing.join()
        for name in ("rank-0.safetensors", "rank-0.json"):
            assert (copied / name).read_bytes() == (saved / name).read_bytes()
    buffers = made._copies._buffers
    on_host = {name for name, buffer in buffers.items() if not buffer.is_pinned()}
    assert not any(name.startswith("model.") or ".exp_avg" in name for name in on_host)
    assert any(name.endswith(".step") for name in on_host) != fused
    fresh = rig.backend(qwen2, hardware="cuda", optimizer={"fused": fused}, model={"init": "random"})
    fresh.load(copied)
    assert fsdp_ranks.update(fresh, slice(None)) == pytest.approx(after[0], rel=1e-6)
