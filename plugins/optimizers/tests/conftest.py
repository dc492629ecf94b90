"""Tests that need an accelerator are collected where one is."""

import torch

collect_ignore = [] if torch.accelerator.is_available() else ["test_adamw_8bit_on_gpu.py"]
