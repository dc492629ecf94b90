"""``drivetrain new``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from drivetrain.cli.new import KINDS


@pytest.mark.parametrize(
    "name, said",
    [
        ("My-Algo", "lower-case words"),
        ("2fast", "lower-case words"),
        ("a--b", "lower-case words"),
        ("a-", "lower-case words"),
        ("../up", "lower-case words"),
        ("a.b", "lower-case words"),
        ("taken", "installed already"),
        ("class", "a word of Python"),
        ("torch", "a package that is installed"),
        ("json", "a package that is installed"),
    ],
)
def test_a_name_that_cannot_be_used_is_refused(
    program, capsys: pytest.CaptureFixture[str], name: str, said: str
) -> None:
    assert program("new", "algorithm", name) == 2
    assert said in capsys.readouterr().err and list(Path().iterdir()) == []


@pytest.mark.parametrize("kind, name, said", [("advantage", "gae", "advantage estimator 'gae' is installed already"),
                                              ("loss", "clip", "policy loss 'clip' is installed already"),
                                              ("loss", "torch", "a package that is installed")])  # fmt: skip
def test_the_name_of_a_function_that_is_taken_is_refused(
    program, capsys: pytest.CaptureFixture[str], kind: str, name: str, said: str
) -> None:
    assert program("new", kind, name) == 2
    assert said in capsys.readouterr().err and list(Path().iterdir()) == []


def texts(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {str(path.relative_to(folder)): path.read_text() for path in files}


@pytest.mark.parametrize("kind, own", [("algorithm", "algo"), ("advantage", "advantage"), ("loss", "loss")])
@pytest.mark.parametrize("name, package, title", [("shiny-new_thing", "shiny_new_thing", "ShinyNewThing"),
                                                  ("not-my-algo", "not_my_algo", "NotMyAlgo"),
                                                  ("not-my-loss", "not_my_loss", "NotMyLoss")])  # fmt: skip
def test_every_file_is_renamed_inside_and_out(
    program, capsys: pytest.CaptureFixture[str], kind: str, own: str, name: str, package: str, title: str
) -> None:
    assert program("new", kind, name) == 0
    assert f"{KINDS[kind].key}={name}" in capsys.readouterr().out
    words = {f"my_{own}": package, f"my-{own}": name, f"My{own.title()}": title}

    def renamed(text: str) -> str:
        return re.sub("|".join(words), lambda found: words[found.group()], text)

    written = texts(Path(name))
    assert written == {renamed(path): renamed(text) for path, text in texts(KINDS[kind].template).items()}
    assert f"src/{package}/{kind}.py" in written and f'name = "{name}"' in written["pyproject.toml"]
    assert [path.name for path in Path().iterdir()] == [name]


def test_a_folder_can_be_named_and_is_never_written_over(program, capsys: pytest.CaptureFixture[str]) -> None:
    assert program("new", "algorithm", "shiny", "--folder", "deep/down") == 0
    assert (Path("deep/down") / "src" / "shiny" / "plugin.py").exists()
    assert program("new", "algorithm", "other", "--folder", "deep/down") == 2
    assert "the folder exists" in capsys.readouterr().err and not list(Path("deep/down").rglob("other"))
