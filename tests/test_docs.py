"""The documentation: generated pages are current, links lead somewhere, commands exist, examples can be read."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer
import yaml

from drivetrain.cli.main import app
from drivetrain.config.models import RunConfig
from drivetrain.seam.registry import get_registry

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "core" / "README.md", *(ROOT / "docs").rglob("*.md"),
                *(ROOT / "plugins").glob("*/README.md")])  # fmt: skip
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_pages_are_current(generator: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert generator.main(["--check"]) == 0, f"{capsys.readouterr().out}run python docs/generate.py"


def test_every_hook_is_documented(generator: ModuleType) -> None:
    text = (ROOT / "docs" / "reference" / "hooks.md").read_text()
    sections = dict(re.findall(r"^## (\w+)\n((?:(?!^## ).*\n)+)", text, re.M))
    assert sections.keys() == generator.HOOKS.keys()
    for name, section in sections.items():
        assert re.match(r"\n[A-Z][^\n]+\.\n", section), f"{name} has no sentence"
        assert f"def {name}(" in section, f"{name} has no example"


def prose(page: Path) -> str:
    """A page without its code."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^ {4}.*$", "", text, flags=re.M))


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to headings."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@every_page
def test_links_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if not re.match(r"[a-z]+:", target):
            path, _, anchor = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            assert file.exists(), f"{target} leads nowhere"
            assert not anchor or anchor in anchors(file), f"{target}: {file.name} has no such heading"


def commands(page: Path) -> Iterator[list[str]]:
    """The words after ``drivetrain`` in code: at the start of a line, or of a span."""
    text = page.read_text()
    blocks = re.findall(r"^```.*?^```", text, re.M | re.S) + re.findall(r"^ {4}.*$", text, re.M)
    for line in "\n".join(blocks).splitlines():
        if found := re.match(r"(?:\$ )?drivetrain (.+)", line.strip()):
            yield found[1].partition(" #")[0].split()
    yield from (span.split() for span in re.findall(r"`drivetrain ([^`\n]+)`", text))


@every_page
def test_commands_exist(page: Path) -> None:
    program: Any = typer.main.get_command(app)
    others = get_registry().names("commands")
    for words in commands(page):
        here, said = program, "drivetrain"
        while hasattr(here, "commands") and words and words[0] not in others and not words[0].startswith("-"):
            assert words[0] in here.commands, f"{said} has no command {words[0]}"
            here, said = here.commands[words[0]], f"{said} {words.pop(0)}"
        if words and words[0] in others:
            continue  # its options are its plugin's
        options = {option for parameter in here.params for option in parameter.opts} | {"--help"}
        for word in (word for word in words if word.startswith("--")):
            assert word in options, f"{said} has no option {word}"


@every_page
def test_examples_can_be_read(page: Path) -> None:
    for language, code in re.findall(r"^```(\w+)\n(.*?)^```", page.read_text(), re.M | re.S):
        if language == "python":
            ast.parse(code)
        if language == "yaml":
            assert set(yaml.safe_load(code)) <= set(RunConfig.model_fields), f"no sections of a config:\n{code}"
