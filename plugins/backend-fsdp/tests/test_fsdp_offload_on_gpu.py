"""On a device: what is offloaded gives its memory back to the device, and returns as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsdp_offload
import fsdp_rig as rig
import pytest
import torch
from transformers import Qwen2Config

from drivetrain_backend_fsdp.backend import FSDPBackend

pytestmark = pytest.mark.gpu
pytest.importorskip("drivetrain_hardware_cuda")
EVERYTHING = ("parameters", "optimizer")
MIB = 2**20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a model of 90 MiB in float32, without weights."""
    folder = tmp_path_factory.mktemp("middle")
    config = Qwen2Config(**rig.SMALL | {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6})
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(folder)
    rig.tokenizer(folder)
    return folder


def made(folder: Path, **options: Any) -> FSDPBackend:
    return rig.backend(folder, hardware="cuda", model={"init": "random"}, **options)


def update(backend: FSDPBackend, rows: int = 12) -> dict[str, float]:
    batch = rig.batch(rows)
    metrics = backend.update(batch, rig.TERMS, rig.counts(batch), temperature=1.0, lr_factor=1.0)
    return {name: metrics[name].result() for name in ("loss", "grad_norm")}


def test_bytes_leave_the_device_and_come_back(folder: Path) -> None:
    backend = made(folder)
    update(backend)
    hardware, held = backend.context.hardware, sum(tensor.nbytes for tensor in fsdp_offload.tensors(backend))
    before, snapshot = hardware.memory(), [tensor.cpu() for tensor in fsdp_offload.tensors(backend)]
    assert held > 200 * MIB
    for _ in range(3):
        backend.offload(EVERYTHING)
        away = hardware.memory()
        assert before.allocated - away.allocated >= held
        assert away.free - before.free >= held - 64 * MIB  # what torch caches in part cannot be given back
        assert backend.memory()["parameters"] == 0
        backend.onload(EVERYTHING)
        assert hardware.memory().allocated >= away.allocated + held
        assert fsdp_offload.same([tensor.cpu() for tensor in fsdp_offload.tensors(backend)], snapshot)


def test_copies_are_in_order_with_the_work_around_them(folder: Path) -> None:
    """Nothing waits on the host between a write and the copy behind it, or a copy and the read behind it."""
    backend = made(folder)
    weights = fsdp_offload.tensors(backend)
    for number in range(20):
        for tensor in weights:
            tensor.fill_(number)
        backend.offload(["parameters"])
        scratch = [torch.full((MIB,), -1.0, device=backend.device) for _ in range(64)]  # takes the memory at once
        backend.onload(["parameters"])
        wrong = sum((tensor != number).sum() for tensor in weights)
        assert int(wrong) == 0
        del scratch


def test_an_update_after_a_round_trip_and_with_offload_within(folder: Path) -> None:
    options: dict[str, Any] = {"micro_batch_tokens": 30}
    plain = made(folder, **options)
    moves = made(folder, **options)
    within = made(folder, **options, grad_offload=True, activation_offload=True)
    for _ in range(2):
        moves.offload(EVERYTHING)
        moves.onload(EVERYTHING)
        expected = update(plain)
        assert update(moves) == pytest.approx(expected, rel=1e-4)
        assert update(within) == pytest.approx(expected, rel=1e-4)


def test_activations_take_less_of_the_device(folder: Path) -> None:
    peaks = []
    for moves in (False, True):
        backend = made(folder, activation_offload=moves)
        update(backend)
        hardware = backend.context.hardware
        hardware.reset_peak()
        start = hardware.memory().allocated
        update(backend, rows=512)
        gradients = sum(parameter.nbytes for parameter in backend.model.parameters())
        peaks.append(hardware.memory().peak - start - gradients)
        backend.close()
    assert peaks[1] < 0.7 * peaks[0]
