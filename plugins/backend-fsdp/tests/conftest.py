import os
import sys
from pathlib import Path

import pytest
import torch

# collected where a device is, as are the tests of its hardware plugin
collect_ignore_glob = [] if torch.accelerator.is_available() else ["*_on_gpu.py"]

os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
sys.path.insert(0, str(Path(__file__).parent))


FAMILIES = ["llama", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "gemma3", "gemma2"]


@pytest.fixture(scope="session", params=FAMILIES)
def any_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny model of each family."""
    import fsdp_rig

    return fsdp_rig.write_model(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="session")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny Qwen2 with tied embeddings."""
    import fsdp_rig

    return fsdp_rig.write_model("qwen2", tmp_path_factory.mktemp("one"))
