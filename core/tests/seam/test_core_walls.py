"""Core knows no plugin, and what only lists or checks imports nothing heavy."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from little_distributions import CORE_SOURCE, Site

from drivetrain.seam.first_party import FIRST_PARTY
from drivetrain.seam.specs import SPEC_TYPES

HEAVY = {"torch", "ray", "transformers", "tensordict", "vllm", "sglang", "megatron", "pyarrow", "reasoning_gym"}
ORDINARY_WORDS = {"format", "gloo", "length", "nccl", "ray", "vllm"}  # which name other things, too
SOURCES = sorted(CORE_SOURCE.rglob("*.py"))


def strings(tree: ast.AST) -> Iterator[ast.Constant]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))


def offered_by_core(site: Site) -> set[str]:
    return {row.name for row in site.registry().rows()}


def test_core_imports_no_plugin() -> None:
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            assert not [name for name in names if name.startswith("drivetrain_")], path
        targets = [s.value for s in strings(ast.parse(path.read_text())) if re.match(r"drivetrain_\w+[.:]\w", s.value)]
        assert not targets, path


def test_core_names_no_plugin_outside_the_table_of_first_party_names(site: Site) -> None:
    names = {name for table in FIRST_PARTY.values() for name in table} - offered_by_core(site) - ORDINARY_WORDS
    assert "grpo" in names
    for path in SOURCES:
        if path.name != "first_party.py":
            found = {s.value for s in strings(ast.parse(path.read_text()))} & names
            assert not found, f"{path} names {found}"


def test_core_compares_no_name_of_a_plugin(site: Site) -> None:
    names = {name for table in FIRST_PARTY.values() for name in table} | offered_by_core(site)
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare) and ".name" in ast.unparse(node):
                assert not {s.value for s in strings(node)} & names, f"{path}:{node.lineno}: {ast.unparse(node)}"


def test_first_party_names_belong_to_hooks() -> None:
    assert set(FIRST_PARTY) <= set(SPEC_TYPES)
    assert all(name.startswith("drivetrain-") for table in FIRST_PARTY.values() for name in table.values())


PLUGIN = """
    from drivetrain import AlgorithmSpec, BackendSpec, OptimizerSpec, RolloutSpec, hookimpl

    @hookimpl
    def drivetrain_algorithms():
        yield AlgorithmSpec(name="toy", summary="", factory="none:none", rewards=False, generates=False)

    @hookimpl
    def drivetrain_backends():
        yield BackendSpec(name="toy", summary="", factory="none:none", provides=("backend.live_module",))

    @hookimpl
    def drivetrain_rollouts():
        yield RolloutSpec(name="toy", summary="", factory="none:none", provides=("rollout.live_module",))

    @hookimpl
    def drivetrain_optimizers():
        yield OptimizerSpec(name="toy", summary="", factory="none:none")
"""
CONFIG = """
model: {path: model}
algorithm: {name: toy}
actor: {backend: {name: toy}, optimizer: {name: toy, lr: 1e-3}}
rollout: {name: toy, max_response_tokens: 5}
data: {batch_prompts: 4, train: {name: jsonl, path: train.jsonl}}
trainer: {steps: 1}
"""
PROBE = """
import json, sys
import drivetrain.seam.registry as registry
from drivetrain.cli.main import run
scan = registry.scan
if sys.argv[1]:
    registry.scan = lambda: scan([sys.argv[1]])
told = {}
for words in json.loads(sys.argv[2]):
    code = run(words)
    told[" ".join(words[:2])] = [code, sorted({name.partition(".")[0] for name in sys.modules})]
print("\\n" + json.dumps(told))
"""


def test_import_budget(site: Site) -> None:
    """``--help``, ``plugins``, ``config`` and ``schema`` with core and little plugins alone."""
    site.add("acme-toy", PLUGIN)
    config = site.folder / "run.yaml"
    config.write_text(CONFIG)
    probe(site.folder, [["--help"], ["plugins"], ["plugins", "--json"], ["config", str(config)], ["schema"]])


def test_import_budget_with_all_that_is_installed(site: Site) -> None:
    probe(None, [["--help"], ["plugins"], ["plugins", "--json"], ["schema"]])


def probe(path: Path | None, commands: list[list[str]]) -> None:
    arguments = [sys.executable, "-c", PROBE, str(path or ""), json.dumps(commands)]
    environment = {"PYTHONPATH": str(path)} if path else {}
    done = subprocess.run(arguments, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert len(told) == len(commands)
    for words, (code, modules) in told.items():
        assert code == 0, f"drivetrain {words}: {done.stderr}"
        assert not HEAVY & set(modules), f"drivetrain {words} imports {HEAVY & set(modules)}"


@pytest.mark.parametrize("module", ["drivetrain", "drivetrain.config", "drivetrain.seam.registry", "drivetrain.errors"])
def test_light_modules(module: str) -> None:
    code = f"import {module}, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not HEAVY & set(done.stdout.split())
