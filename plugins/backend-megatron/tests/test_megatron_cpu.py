"""The CPU stands in for a CUDA device inside the context, and nowhere else."""

from __future__ import annotations

import pytest
import torch

from drivetrain_backend_megatron import cpu

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")


def test_cuda_means_the_cpu_inside_alone() -> None:
    before = {name: getattr(torch.cuda, name) for name in ("current_device", "Stream", "manual_seed")}
    with cpu.stand_in():
        with cpu.stand_in():
            assert torch.zeros(2, device="cuda").device.type == "cpu"
        tensor = torch.arange(3)
        assert tensor.cuda() is tensor and tensor.to("cuda").device.type == "cpu"
        assert tensor.pin_memory().data_ptr() != tensor.data_ptr()
        assert torch.empty(3, device=torch.cuda.current_device(), pin_memory=True).device.type == "cpu"
        assert torch.cuda.Stream().wait_stream(None) is not None
    assert {name: getattr(torch.cuda, name) for name in before} == before
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(2, device="cuda")


def test_what_was_replaced_comes_back_after_an_error() -> None:
    before = torch.cuda.current_device
    with pytest.raises(KeyError), cpu.stand_in():
        raise KeyError
    assert torch.cuda.current_device is before
