"""Configs are resolved with core and one little distribution; what else the machine has installed stays out."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "seam"))

from little_distributions import Site
from little_engines import PLUGIN, RUN, SECTIONS, Load, Program, Refused

from drivetrain.config.resolve import Resolved, load_config
from drivetrain.errors import DrivetrainError
from drivetrain.seam import registry as registry_module
from drivetrain.seam.registry import Registry


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    registry_module.get_registry()  # made before the little site is on the path, for whatever tests come later
    site = Site(tmp_path_factory.mktemp("site"))
    site.add("acme-engines", PLUGIN, files={"sections.py": SECTIONS})
    site.add("acme-broken", "import missing_engine")
    sys.path.insert(0, str(site.folder))
    yield site.registry()
    sys.path.remove(str(site.folder))  # or other tests' registries would find this site
    site.forget()


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = Path("run.yaml")
    path.write_text(RUN)
    return path


@pytest.fixture
def load(run_file: Path, registry: Registry) -> Load:
    """Resolve ``run.yaml``, with a text in place of its own where one is given."""

    def resolved(*overrides: str, text: str | None = None) -> Resolved:
        if text is not None:
            run_file.write_text(text)
        return load_config(run_file, overrides, registry)

    return resolved


@pytest.fixture
def refused(load: Load) -> Refused:
    """The lines of the error that a config is refused with."""

    def lines(*overrides: str, text: str | None = None) -> list[str]:
        with pytest.raises(DrivetrainError) as raised:
            load(*overrides, text=text)
        assert raised.value.exit_code == 2
        return str(raised.value).splitlines()

    return lines


@pytest.fixture
def program(registry: Registry, run_file: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """The ``drivetrain`` program with the little distributions alone; returns its exit code."""
    from drivetrain.cli import main, show, train

    for module in (registry_module, show, train):
        monkeypatch.setattr(module, "get_registry", lambda: registry)
    return lambda *words: main.run(list(words))
