"""``drivetrain new``: a plugin of one's own, copied from a working one."""

from __future__ import annotations

import importlib.util
import keyword
import re
import shutil
from pathlib import Path

from drivetrain.errors import UserError
from drivetrain.seam.registry import get_registry

TEMPLATE = Path(__file__).parent.parent / "_template"
_SKIPPED = shutil.ignore_patterns("__pycache__", "*.pyc", "*.egg-info", ".pytest_cache")


def new_algorithm(name: str, folder: Path | None) -> None:
    """Write the distribution.

    Raises:
        UserError: the name cannot be a package's, is taken, or the folder exists.
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*", name):
        raise UserError(f"{name!r} cannot be the name of an algorithm", where="drivetrain new",
                        mend="use lower-case words joined by hyphens, such as my-algo")  # fmt: skip
    if name in get_registry().names("algorithms"):
        raise UserError(
            f"an algorithm {name!r} is installed already", where="drivetrain new", mend="choose another name"
        )
    module = name.replace("-", "_")
    installed = importlib.util.find_spec(module)
    if keyword.iskeyword(module) or (installed is not None and installed.origin is not None):
        why = "a word of Python" if keyword.iskeyword(module) else "a package that is installed"
        raise UserError(f"{module!r} is {why}", where="drivetrain new", mend="choose another name")
    target = folder or Path(name)
    if target.exists():
        raise UserError("the folder exists", where=str(target), mend="choose another one with --folder")
    words = {"my_algo": module, "my-algo": name, "MyAlgo": "".join(part.title() for part in re.split("[-_]", name))}
    aside = target.with_name(f".{target.name}.part")
    shutil.rmtree(aside, ignore_errors=True)
    shutil.copytree(TEMPLATE, aside, ignore=_SKIPPED)
    for path in sorted(aside.rglob("*"), reverse=True):
        if path.is_file():
            path.write_text(_replaced(path.read_text(encoding="utf-8"), words), encoding="utf-8")
        path.rename(path.with_name(_replaced(path.name, words)))
    aside.rename(target)
    print(f"wrote {target}\n  pip install -e {target}\n  drivetrain train run.yaml algorithm.name={name}")


def _replaced(text: str, words: dict[str, str]) -> str:
    for old, new in words.items():
        text = text.replace(old, new)
    return text
