import os
import sys
from pathlib import Path

import torch

# collected where a device is, or where Triton's interpreter takes its place
if not torch.accelerator.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["*_on_gpu.py"]
sys.path.insert(0, str(Path(__file__).parent))
