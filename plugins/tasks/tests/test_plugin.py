from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from drivetrain import PluginConfig, PluginSpec
from drivetrain_tasks import plugin

SPECS = [*plugin.drivetrain_datasets(), *plugin.drivetrain_rewards()]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.hook}-{spec.name}")
def test_what_a_spec_names_is_there(spec: PluginSpec) -> None:
    assert spec.config is not None
    factory, config = (_load(name) for name in (spec.factory, spec.config))
    assert callable(factory)
    assert issubclass(config, PluginConfig)
    assert all(field.description for name, field in config.model_fields.items() if name != "name")


def _load(name: str) -> type:
    module, _, attribute = name.partition(":")
    found: type = getattr(importlib.import_module(module), attribute)
    return found


def test_listing_and_configs_import_nothing_heavy() -> None:
    heavy = ("torch", "transformers", "pyarrow", "sympy", "reasoning_gym")
    code = f"""
import sys, drivetrain_tasks.plugin as plugin, drivetrain_tasks.configs
list(plugin.drivetrain_datasets()), list(plugin.drivetrain_rewards())
print([name for name in {heavy} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
