import os
import sys
from pathlib import Path

import pytest
import torch

os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
sys.path.insert(0, str(Path(__file__).parent))
collect_ignore_glob = [] if torch.accelerator.is_available() else ["*_on_gpu.py"]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of a tiny model, with and without an output head that is its embedding."""
    import hybrid_rig

    folder = tmp_path_factory.mktemp("models")
    return {name: hybrid_rig.write_model(folder / name, tied=name == "tied") for name in ("untied", "tied")}


@pytest.fixture(params=["untied", "tied"])
def model(request: pytest.FixtureRequest, models: dict[str, Path]) -> Path:
    """Folder of one of them."""
    return models[request.param]
