"""The ``drivetrain`` program with core and one little distribution as all that is installed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "driver"))
sys.path.insert(0, str(Path(__file__).parents[1] / "seam"))

from little_distributions import Site
from only_installed import only_installed

from drivetrain.cli import main
from drivetrain.seam.registry import get_registry

PLUGIN = """
    from drivetrain import AlgorithmSpec, CommandSpec, hookimpl

    @hookimpl
    def drivetrain_algorithms():
        yield AlgorithmSpec(name="taken", summary="", factory="no:no")

    @hookimpl
    def drivetrain_commands():
        for word in ("greet", "fail", "shelf"):
            yield CommandSpec(name=word, summary=f"Does {word}.", factory=f"{package}.work:{word}")
        yield CommandSpec(name="train", summary="Hides the command of core.", factory="{package}.work:greet")
        yield CommandSpec(name="broken", summary="Lacks its module.", factory="{package}.gone:broken")
"""
WORK = """
    import typer
    from drivetrain.errors import RunError, UserError

    def greet(name: str, loud: bool = False, times: int = 1):
        print(*["HELLO " + name if loud else "hello " + name] * times)

    def fail(how: str):
        raise {
            "user": UserError("wrong", mend="mend it"), "run": RunError("broke"), "bug": KeyError("key"),
            "exit": typer.Exit(7), "fine": typer.Exit(0), "interrupt": KeyboardInterrupt(), "abort": typer.Abort(),
            "eof": EOFError("file is cut off"),
        }[how]

    shelf = typer.Typer()

    @shelf.command()
    def put(thing: str): print("put", thing)

    @shelf.command()
    def take(): print("took")
"""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with only_installed(tmp_path / "site"):
        made = Site(tmp_path / "site")
        made.add("acme-tools", PLUGIN, files={"work.py": WORK})
        yield made
        made.forget()


@pytest.fixture
def program(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs ``drivetrain WORDS`` in an empty folder; returns the exit code."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def run(*words: str) -> int:
        get_registry.cache_clear()
        monkeypatch.setattr(main.app, "registered_commands", list(main.app.registered_commands))
        return main.run(list(words))

    return run
