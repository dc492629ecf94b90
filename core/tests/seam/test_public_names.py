"""``drivetrain`` names the same things at run time and for type checkers."""

from __future__ import annotations

import ast
import importlib

import pytest
from little_distributions import CORE_SOURCE

import drivetrain


def in_the_stub() -> dict[str, str]:
    """Each name of ``__init__.pyi`` and the module that it comes from."""
    tree = ast.parse((CORE_SOURCE / "__init__.pyi").read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert all(alias.name == alias.asname for node in imports for alias in node.names), "else it is not re-exported"
    return {alias.name: node.module or "" for node in imports for alias in node.names}


def test_the_stub_and_the_table_name_the_same_things() -> None:
    stub, table = in_the_stub(), {name: f"drivetrain.{module}" for name, module in drivetrain._HOME.items()}
    assert stub == {**table, **dict.fromkeys(drivetrain._MODULES, "drivetrain")}
    assert sorted(["__version__", *stub]) == sorted(drivetrain.__all__) == dir(drivetrain)


@pytest.mark.parametrize("name", in_the_stub())
def test_every_name_is_there(name: str) -> None:
    module = in_the_stub()[name]
    found = getattr(drivetrain, name)
    assert found is (importlib.import_module(f"drivetrain.{name}") if module == "drivetrain" else
                     getattr(importlib.import_module(module), name))  # fmt: skip


def test_another_name_is_refused() -> None:
    with pytest.raises(AttributeError, match="module 'drivetrain' has no attribute 'nothing'"):
        _ = drivetrain.nothing
