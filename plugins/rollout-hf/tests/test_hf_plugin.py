"""What is offered, and that offering it is cheap."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest
from pydantic import ValidationError

from drivetrain import RolloutEngine, RolloutSpec
from drivetrain_rollout_hf.config import HFRolloutConfig
from drivetrain_rollout_hf.plugin import drivetrain_rollouts


def test_spec() -> None:
    (spec,) = drivetrain_rollouts()
    assert isinstance(spec, RolloutSpec) and spec.name == "hf"
    for target, base in ((spec.factory, RolloutEngine), (spec.config or "", HFRolloutConfig)):
        module, _, attribute = target.partition(":")
        assert issubclass(getattr(importlib.import_module(module), attribute), base)


def test_plugin_and_config_import_no_engine() -> None:
    code = (
        "import sys, drivetrain_rollout_hf.plugin as plugin, drivetrain_rollout_hf.config\n"
        "list(plugin.drivetrain_rollouts())\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_options() -> None:
    assert HFRolloutConfig(name="hf", max_response_tokens=5).max_batch_sequences == 256
    for wrong in ({"max_batch_sequences": 0}, {"max_batch_size": 4}):
        with pytest.raises(ValidationError):
            HFRolloutConfig(name="hf", max_response_tokens=5, **wrong)
