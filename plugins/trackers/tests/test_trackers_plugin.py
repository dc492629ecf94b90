"""What the plugin offers, and what is refused before a run starts."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from drivetrain import PluginConfig, PluginSpec, Tracker
from drivetrain_trackers import configs, plugin

SPECS = list(plugin.drivetrain_trackers())
NEEDS = {"parquet": "pyarrow", "tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "sqlalchemy"}


def load(name: str | None) -> Any:
    module, _, attribute = str(name).partition(":")
    return getattr(importlib.import_module(module), attribute)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_what_a_spec_names_is_there(spec: PluginSpec) -> None:
    factory, config = load(spec.factory), load(spec.config)
    assert issubclass(factory, Tracker) and issubclass(config, PluginConfig)
    assert factory.background == (spec.name in ("tensorboard", "wandb", "mlflow"))
    assert all(field.description for field in config.model_fields.values())
    assert list(config(name=spec.name).check(None, None)) == []


@pytest.mark.parametrize("name", NEEDS)
def test_a_missing_package_is_a_problem_of_the_config(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    [spec] = [spec for spec in SPECS if spec.name == name]
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda wanted: None if wanted == NEEDS[name] else real(wanted))
    [problem] = load(spec.config)(name=name).check(None, None)
    assert problem.key == "name"
    assert problem.what == f"tracker '{name}' needs {NEEDS[name]}, not installed here"
    assert problem.mend == f"pip install 'drivetrain-trackers[{name}]'"


def test_a_folder_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B leaves a folder of its own name in the current one."""
    (tmp_path / "leftovers").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(configs.WandbConfig, "packages", lambda self: ("leftovers",))
    assert importlib.util.find_spec("leftovers") is not None
    assert [problem.key for problem in configs.WandbConfig(name="wandb").check(None, None)] == ["name"]


def test_a_server_of_mlflow_needs_no_database(monkeypatch: pytest.MonkeyPatch) -> None:
    assert configs.MlflowConfig(name="mlflow").packages() == ("mlflow", "sqlalchemy", "alembic")
    assert configs.MlflowConfig(name="mlflow", tracking_uri="http://localhost:1").packages() == ("mlflow",)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://localhost:1")
    assert configs.MlflowConfig(name="mlflow").packages() == ("mlflow",)


def test_listing_and_configs_import_nothing_heavy() -> None:
    heavy = ("torch", "pyarrow", "tensorboard", "wandb", "mlflow", "sqlalchemy")
    code = f"""
import sys, drivetrain_trackers.plugin as plugin, drivetrain_trackers.configs as configs
list(plugin.drivetrain_trackers())
for kind in (configs.ParquetTrackerConfig, configs.TensorBoardConfig, configs.WandbConfig, configs.MlflowConfig):
    list(kind(name="x").check(None, None))
print([name for name in {heavy} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
