"""``drivetrain new``: a plugin of one's own, copied from a working one."""

from __future__ import annotations

import importlib.util
import keyword
import re
import shutil
from pathlib import Path
from typing import NamedTuple

from drivetrain.errors import UserError
from drivetrain.seam.registry import get_registry
from drivetrain.seam.specs import SPEC_TYPES

PACKAGE = Path(__file__).parent.parent
_SKIPPED = shutil.ignore_patterns("__pycache__", "*.pyc", "*.egg-info", ".pytest_cache")


class Kind(NamedTuple):
    """What can be written: its template, the name in there, the hook that offers it, and the key that selects it."""

    template: Path
    placeholder: str
    hook: str
    key: str


KINDS = {
    "algorithm": Kind(PACKAGE / "_template", "my-algo", "algorithms", "algorithm.name"),
    "advantage": Kind(PACKAGE / "_template_advantage", "my-advantage", "advantage_estimators", "algorithm.advantage"),
    "loss": Kind(PACKAGE / "_template_loss", "my-loss", "policy_losses", "algorithm.policy_loss"),
}


def new(kind: str, name: str, folder: Path | None) -> None:
    """Write the distribution.

    Args:
        kind: a key of ``KINDS``.

    Raises:
        UserError: the name cannot be a package's, is taken, or the folder exists.
    """
    template, placeholder, hook, key = KINDS[kind]
    if not re.fullmatch(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*", name):
        raise UserError(f"{name!r} cannot be the name of a plugin", where="drivetrain new",
                        mend=f"use lower-case words joined by hyphens, such as {placeholder}")  # fmt: skip
    if name in get_registry().names(hook):
        raise UserError(f"{SPEC_TYPES[hook].noun} {name!r} is installed already", where="drivetrain new",
                        mend="choose another name")  # fmt: skip
    module = name.replace("-", "_")
    installed = importlib.util.find_spec(module)
    if keyword.iskeyword(module) or (installed is not None and installed.origin is not None):
        why = "a word of Python" if keyword.iskeyword(module) else "a package that is installed"
        raise UserError(f"{module!r} is {why}", where="drivetrain new", mend="choose another name")
    target = folder or Path(name)
    if target.exists():
        raise UserError("the folder exists", where=str(target), mend="choose another one with --folder")
    words = dict(zip(_spellings(placeholder), _spellings(name)))
    aside = target.with_name(f".{target.name}.part")
    shutil.rmtree(aside, ignore_errors=True)
    shutil.copytree(template, aside, ignore=_SKIPPED)
    for path in sorted(aside.rglob("*"), reverse=True):
        if path.is_file():
            path.write_text(_replaced(path.read_text(encoding="utf-8"), words), encoding="utf-8")
        path.rename(path.with_name(_replaced(path.name, words)))
    aside.rename(target)
    print(f"wrote {target}\n  pip install -e {target}\n  drivetrain train run.yaml {key}={name}")


def _spellings(name: str) -> tuple[str, str, str]:
    """The name as a module, as it is, and as a class."""
    return name.replace("-", "_"), name, "".join(part.title() for part in re.split("[-_]", name))


def _replaced(text: str, words: dict[str, str]) -> str:
    for old, new in words.items():
        text = text.replace(old, new)
    return text
