"""What the distribution offers, and that offering it is cheap."""

import subprocess
import sys

import pytest
from pydantic import ValidationError

from drivetrain_backend_fsdp.config import AdamWConfig, FSDPConfig, MuonConfig


def test_offers_are_cheap() -> None:
    code = (
        "import sys; from drivetrain_backend_fsdp import plugin, config;"
        " names = [s.name for s in (*plugin.drivetrain_backends(), *plugin.drivetrain_optimizers())];"
        " assert names == ['fsdp', 'adamw', 'muon'];"
        " assert not {'torch', 'transformers', 'safetensors'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_options_are_checked() -> None:
    assert FSDPConfig().name == "fsdp" and AdamWConfig(lr=1e-3).name == "adamw"
    for model, options in (
        (FSDPConfig, {"micro_batch_tokens": 0}),
        (FSDPConfig, {"unknown": 1}),
        (AdamWConfig, {}),
        (FSDPConfig, {"max_skipped_steps": -1}),
        (AdamWConfig, {"lr": 1e-3, "betas": (0.9, 1.0)}),
        (AdamWConfig, {"lr": 1e-3, "momentum": 0.9}),
        (MuonConfig, {"lr": 1e-3, "momentum": 1.0}),
        (MuonConfig, {"lr": 1e-3, "ns_steps": 0}),
        (MuonConfig, {"lr": 1e-3, "adjust_lr": "none"}),
    ):
        with pytest.raises(ValidationError):
            model(**options)
