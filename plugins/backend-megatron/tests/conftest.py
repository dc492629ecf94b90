import os
import sys
from pathlib import Path

import torch

if not torch.accelerator.is_available():
    collect_ignore_glob = ["*_on_gpu.py"]
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
sys.path.insert(0, str(Path(__file__).parent))
