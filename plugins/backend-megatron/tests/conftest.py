import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

if not torch.accelerator.is_available():
    collect_ignore_glob = ["*_on_gpu.py"]
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def groups_go() -> Iterator[None]:
    """After a test its models' process groups, and a world of one that they made, are gone."""
    yield
    from drivetrain_backend_megatron import parallel

    while parallel._users:
        parallel.release()
    assert not dist.is_initialized()
