"""Tests that need a GPU are collected where one is."""

from __future__ import annotations

from drivetrain_hardware_cuda.cuda import CUDA

collect_ignore = [] if CUDA.detect() else ["test_cuda_on_gpu.py"]
